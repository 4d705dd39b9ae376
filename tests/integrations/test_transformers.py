"""paceline.integrations.transformers.generate compared with transformers' own: the same calls, the same answers."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from model_support import FOREIGN, NATIVE, VOCABULARY, tiny
from paceline.errors import ModelError, PacelineError, ParameterError
from paceline.integrations.transformers.call_config import HONOURED, NEUTRAL, OTHERS
from paceline.integrations.transformers.hooks import Processed, Record
from paceline.transformers import generate
from server_support import byte_tokenizer

FAMILIES = ["llama", "qwen2", "qwen3", "mistral with a window", "opt", "gpt2"]
DRAFT_LENGTH = {"num_assistant_tokens": 3}  # a fixed length: no calibration


def model_of(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    return tiny(*(NATIVE | FOREIGN)[name], seed=seed)


def padded(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Prompts that repeat themselves, so that lookup finds drafts; padded on the left with the token 0."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = (
        torch.zeros(len(lengths), max(lengths), dtype=torch.long),
        torch.zeros(len(lengths), max(lengths)).long(),
    )
    for row, length in enumerate(lengths):
        text = torch.randint(3, VOCABULARY, (length,), generator=generator)
        ids[row, -length:], mask[row, -length:] = text.repeat(2)[:length], 1
    return {"input_ids": ids, "attention_mask": mask}


def both(model: PreTrainedModel, prompts: dict[str, Tensor], **kwargs: Any) -> tuple[Tensor, Tensor]:
    """transformers' answers without an assistant, which it refuses for batches; and paceline's."""
    theirs = model.generate(**prompts, **{k: v for k, v in kwargs.items() if k != "assistant_model"})
    ours = generate(model, **prompts, **DRAFT_LENGTH, **kwargs)
    assert isinstance(ours, Tensor)
    return theirs, ours


@pytest.mark.parametrize("name", [*FAMILIES, "gemma3", "gpt_neox"])
def test_greedy_answers_to_a_padded_batch_equal_transformers(name: str) -> None:
    model = model_of(name)
    theirs, ours = both(model, padded([7, 3, 12]), max_new_tokens=24, do_sample=False)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("mode", [torch.inference_mode, partial(torch.device, "meta")], ids=["inference", "device"])
def test_greedy_answers_under_the_callers_torch_modes(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """The first call, which loads the model, is in the mode; the second, on the same engine, is not."""
    model, prompts = model_of(), padded([7, 3, 12])
    processors = LogitsProcessorList([_Odd()])
    fields: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "logits_processor": processors, **DRAFT_LENGTH}
    with mode():
        found = generate(model, **prompts, **fields)
    again = generate(model, **prompts, **fields)
    theirs, _ = both(model, prompts, max_new_tokens=24, do_sample=False, logits_processor=processors)
    assert isinstance(found, Tensor)
    assert isinstance(again, Tensor)
    assert torch.equal(found, theirs)
    assert torch.equal(again, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_with_an_assistant(name: str) -> None:
    model, assistant = model_of(name), model_of(name, seed=1)
    theirs, ours = both(model, padded([5, 9]), max_new_tokens=16, do_sample=False, assistant_model=assistant)
    assert torch.equal(theirs, ours)


CONFIGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "suppress_tokens": [5, 6]},
    "bad_words": {"bad_words_ids": [[7], [8, 9], [11]]},
    "sequence_bias": {"sequence_bias": [[[7], 4.0], [[8, 9], -9.0]]},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_length": {"min_length": 18},
    "forced_eos": {"forced_eos_token_id": 2},
    "begin_suppress": {"begin_suppress_tokens": list(range(3, 30))},
    "decay": {"exponential_decay_length_penalty": (3, 1.4)},
    "max_length": {"max_length": 17, "max_new_tokens": None},
    "ends": {"eos_token_id": [2, *range(20, 32)]},
    "ends and least": {"eos_token_id": [2, *range(20, 32)], "min_new_tokens": 5, "pad_token_id": 1},
    "renormalized": {"renormalize_logits": True, "remove_invalid_values": True, "repetition_penalty": 1.2},
    "by default": {"max_new_tokens": None},
}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")  # transformers says so of "by default"
@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_means_the_same_as_in_transformers(name: str) -> None:
    fields = {"max_new_tokens": 20, "do_sample": False} | CONFIGS[name]
    theirs, ours = both(model_of(), padded([7, 3, 12]), **fields)
    assert torch.equal(theirs, ours)


def test_configurations_are_merged_as_in_transformers() -> None:
    model = model_of()
    model.generation_config = GenerationConfig(repetition_penalty=1.5, eos_token_id=2, pad_token_id=0, top_k=7)
    given = GenerationConfig(max_new_tokens=11, no_repeat_ngram_size=2)
    prompts = padded([6, 4])
    theirs = model.generate(**prompts, generation_config=given)
    ours = generate(model, **prompts, generation_config=given)
    assert isinstance(ours, Tensor)
    assert torch.equal(theirs, ours)


class _Odd:
    """A custom processor: no odd token after an odd one."""

    def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[text[:, -1] % 2 == 1, 1::2] = -torch.inf
        return scores * 0.5


def _ends_at_a_multiple_of_seven(text: Tensor, scores: object) -> Tensor:
    return text[:, -1] % 7 == 0


def test_custom_processors_criteria_and_allowed_tokens() -> None:
    model = model_of()
    hooks: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([_Odd()]),
        "stopping_criteria": StoppingCriteriaList([_ends_at_a_multiple_of_seven]),
        "prefix_allowed_tokens_fn": lambda row, text: [token for token in range(3, 60) if token % 5 != row],
    }
    theirs, ours = both(model, padded([7, 3, 12, 5]), max_new_tokens=30, do_sample=False, **hooks)
    assert torch.equal(theirs, ours)
    assert len({int(row) for row in (ours[:, 12:] == 0).sum(1)}) > 1, "rows end at different lengths"


def test_scores_and_logits_are_those_of_transformers() -> None:
    model, prompts = model_of(), padded([7, 3])
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 9}
    fields = asked | {"repetition_penalty": 1.3, "do_sample": False}
    theirs, ours = model.generate(**prompts, **fields), generate(model, **prompts, **fields, **DRAFT_LENGTH)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(theirs.sequences, ours.sequences)
    for kind in ("scores", "logits"):
        assert len(theirs[kind]) == len(ours[kind])
        for there, here in zip(theirs[kind], ours[kind], strict=True):
            torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


def test_scores_end_with_an_end_token_that_was_drafted() -> None:
    record, logits = Record(), torch.arange(4.0)
    row = Processed(torch.tensor([[1]]), (), {2}, 9, record)
    row.scores([], logits)
    row.advance([2, 3])  # the token behind the end was drawn from logits that no processor has seen
    assert [scores.tolist() for scores in record.scores] == [logits.tolist()]


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k and top_p": {"top_k": 9, "top_p": 0.6, "temperature": 1.4},
    "top_p and min_p": {"top_k": 0, "top_p": 0.7, "min_p": 0.1, "temperature": 2.0},
    "typical": {"typical_p": 0.5},
    "epsilon and eta": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_k": 0},
    "default cut": {"temperature": 3.0},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_tokens_have_a_probability_in_transformers(name: str) -> None:
    """Every token has a probability under transformers' own processors; other tests check the distribution."""
    model, prompts = model_of(), padded([7, 3])
    fields = {"do_sample": True, "max_new_tokens": 12} | SAMPLED[name]
    torch.manual_seed(0)
    ours = generate(model, **prompts, num_return_sequences=6, **fields, **DRAFT_LENGTH)
    assert isinstance(ours, Tensor)
    assert ours.shape[0] == 12
    mask = torch.cat([prompts["attention_mask"].repeat_interleave(6, 0), torch.ones(12, ours.shape[1] - 7).long()], 1)
    forced = generate_forced(model, ours, mask, fields)
    alive = (ours[:, 7:] == 2).cumsum(1) - (ours[:, 7:] == 2).long() == 0
    assert bool((forced[alive] > -torch.inf).all())


def generate_forced(model: PreTrainedModel, sequences: Tensor, mask: Tensor, fields: dict[str, Any]) -> Tensor:
    """The scores [B, N] of transformers for these answers' tokens."""
    steps: list[Tensor] = []

    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=sequences, attention_mask=mask, position_ids=positions).logits
    config = GenerationConfig(**{"top_k": 50, **fields})
    model._prepare_special_tokens(config, True, device="cpu")
    processors = model._get_logits_processor(config, input_ids_seq_length=7, device="cpu")
    for place in range(7, sequences.shape[1]):
        scores = processors(sequences[:, :place], logits[:, place - 1].float())
        steps.append(scores.gather(1, sequences[:, place : place + 1]))
    return torch.cat(steps, 1)


def test_torchs_seed_fixes_the_draws() -> None:
    model, prompts = model_of(), padded([7, 3])
    fields = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(generate(model, **prompts, **fields, **DRAFT_LENGTH))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
    first = answers[0]
    assert isinstance(first, Tensor)
    assert len({tuple(row.tolist()) for row in first}) == 6, "every answer is drawn for itself"


def test_speculation_changes_no_draw_and_processors_see_every_drawn_token() -> None:
    model, prompts = model_of(), padded([7, 3, 12])
    fields = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 20, "logits_processor": [_Odd()]}
    answers = []
    drafters: list[dict[str, Any]] = [
        {"num_assistant_tokens": 0},
        DRAFT_LENGTH,
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": model} | DRAFT_LENGTH,
    ]
    for drafting in drafters:
        torch.manual_seed(4)
        answers.append(generate(model, **prompts, **(fields | drafting)))
    assert all(torch.equal(answers[0], other) for other in answers[1:])


class _Noted(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.put_so_far: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.put_so_far.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_then_tokens_then_the_end() -> None:
    model, prompts = model_of(), padded([7])
    theirs, ours = _Noted(), _Noted()
    model.generate(**prompts, max_new_tokens=9, do_sample=False, streamer=theirs)
    generate(model, **prompts, max_new_tokens=9, do_sample=False, streamer=ours, **DRAFT_LENGTH)
    assert ours.put_so_far == theirs.put_so_far
    assert ours.ended


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 4},
    "penalty_alpha": {"penalty_alpha": 0.6},
    "guidance_scale": {"guidance_scale": 1.5},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "stop_strings": {"stop_strings": ["x"]},
    "streamer": {"streamer": _Noted()},
    "past_key_values": {"past_key_values": object()},
    "inputs_embeds": {"inputs_embeds": torch.zeros(2, 3, 24)},
    "max_length": {"max_length": 7, "max_new_tokens": None},
    "synced_gpus": {"synced_gpus": True},
    "attention_mask": {"attention_mask": torch.tensor([[1] * 6 + [0]] * 2)},
    "token_type_ids": {"token_type_ids": torch.ones(2, 7).long()},
    "generation_config": {"generation_config": {"max_new_tokens": 3}},
    "assistant_tokenizer": {"assistant_model": "itself", "assistant_tokenizer": object()},
    "use_cache": {"use_cache": False},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3, "assistant_model": "itself"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_are_refused_by_name(name: str) -> None:
    model = model_of()
    given = padded([7, 3]) | {"max_new_tokens": 5} | REFUSED[name]
    if given.get("assistant_model") == "itself":
        given["assistant_model"] = model
    with pytest.raises(ParameterError) as raised:
        generate(model, **given)
    assert raised.value.field == name


CALLED: dict[str, Any] = {  # what is refused deeper down, by the caller's name
    "eos_token_id": [-1, [2, VOCABULARY], "x", 1.5],
    "min_new_tokens": [-2],
    "max_time": [-1.0],
    "repetition_penalty": [0.0],
    "num_assistant_tokens": [100],
    "prompt_lookup_num_tokens": [100],
    "assistant_model": ["foo", 5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CALLED.items() for value in values])
def test_errors_say_what_the_caller_said(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name}="):
        generate(model_of(), **padded([7, 3]), **{"max_new_tokens": 5, name: value})


def test_an_assistant_with_another_vocabulary_is_refused_unless_the_tokenizers_are_the_same() -> None:
    tokenizer = byte_tokenizer()
    sizes = len(tokenizer), len(tokenizer) + 7  # padded
    model, assistant = (tiny("llama", NATIVE["llama"][1] | {"vocab_size": size}) for size in sizes)
    prompts = padded([5, 9])
    fields = {"max_new_tokens": 6, "do_sample": False, **DRAFT_LENGTH}
    with pytest.raises(ParameterError, match=f"^assistant_model=.*{sizes[1]} tokens.*assistant_tokenizer"):
        generate(model, **prompts, assistant_model=assistant, **fields)
    both_given = {"tokenizer": tokenizer, "assistant_tokenizer": byte_tokenizer()}
    assert torch.equal(
        generate(model, **prompts, assistant_model=assistant, **both_given, **fields),
        generate(model, **prompts, **fields),
    )
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"] |= {"a": described["model"]["vocab"]["b"], "b": described["model"]["vocab"]["a"]}
    swapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), eos_token="<eos>")
    with pytest.raises(ParameterError, match=r"^assistant_tokenizer=.*token \d+ is"):
        generate(model, **prompts, assistant_model=assistant, **both_given | {"assistant_tokenizer": swapped}, **fields)


def test_fields_are_honoured_or_refused_and_exist() -> None:
    assert not HONOURED & (set(NEUTRAL) | OTHERS)
    assert set(GenerationConfig().to_dict()) >= HONOURED


@pytest.mark.parametrize("through_data", [False, True])
def test_changed_weights_rebuild_the_engine_and_deleted_models_are_freed(through_data: bool) -> None:
    model, prompts = model_of(), padded([7, 3])
    before = generate(model, **prompts, max_new_tokens=9, do_sample=False, **DRAFT_LENGTH)
    with torch.no_grad():
        for weight in model.parameters():
            (weight.data if through_data else weight).mul_(-0.7)
    del weight
    theirs, ours = both(model, prompts, max_new_tokens=9, do_sample=False)
    assert torch.equal(theirs, ours)
    assert not torch.equal(before, ours)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_that_computes_something_else_than_its_weights_say_is_refused() -> None:
    """A steering hook. It is removed, put on again and moved, and every call sees it."""
    model, prompts = model_of(), padded([6])
    fields: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    plain = generate(model, **prompts, **fields, **DRAFT_LENGTH)
    hook = model.get_submodule("model.layers.1").register_forward_hook(lambda module, args, output: output * -3)
    with pytest.raises(ModelError, match="Hooks"):
        generate(model, **prompts, **fields, **DRAFT_LENGTH)
    hook.remove()
    again = generate(model, **prompts, **fields, **DRAFT_LENGTH)
    assert isinstance(plain, Tensor)
    assert isinstance(again, Tensor)
    assert torch.equal(plain, again)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers calls otherwise now
def test_adapters_of_peft_may_be_switched_between_calls() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, prompts = model_of("gpt_neox"), padded([6])
    config = peft.LoraConfig(r=4, target_modules=["query_key_value"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    for context in (nullcontext, adapted.disable_adapter, nullcontext):
        with context():
            theirs, ours = both(model, prompts, max_new_tokens=8, do_sample=False)
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("short", ["model", "assistant_model"])
def test_answers_beyond_the_positions_are_refused_not_cut(short: str) -> None:
    name, config = NATIVE["llama"]
    little = tiny(name, {**config, "max_position_embeddings": 8}, seed=1)
    models = (little, None) if short == "model" else (model_of(), little)
    with pytest.raises(
        ParameterError, match=f"max_new_tokens=4 .* at most 2 after a prompt of 6 tokens: {short} has 8"
    ):
        generate(models[0], **padded([6]), assistant_model=models[1], max_new_tokens=4, **DRAFT_LENGTH)


def test_a_call_inside_of_a_call_is_an_error_not_a_wait() -> None:
    class Again(BaseStreamer):  # type: ignore[misc]
        def put(self, value: Tensor) -> None:
            generate(model, **padded([3]), max_new_tokens=2)

        def end(self) -> None:
            pass

    model = model_of()
    with pytest.raises(PacelineError, match="called generate on the model that runs it"):
        generate(model, **padded([6]), max_new_tokens=4, streamer=Again(), **DRAFT_LENGTH)
    assert generate(model, **padded([3]), max_new_tokens=2, do_sample=False, **DRAFT_LENGTH) is not None


def test_a_model_without_its_weights_is_refused() -> None:
    with pytest.raises(ParameterError, match="with all of its weights in memory"):
        generate(model_of().to("meta"), **padded([6]), max_new_tokens=4)


def test_the_cache_of_older_checkpoints_is_ignored_as_transformers_does() -> None:
    model = model_of()
    model.generation_config.cache_implementation = "hybrid"
    theirs, ours = both(model, padded([6]), max_new_tokens=4, do_sample=False)
    assert torch.equal(theirs, ours)


def test_a_processors_exception_reaches_the_caller_and_the_next_call_works() -> None:
    model, prompts = model_of(), padded([7, 3])

    def broken(text: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        generate(model, **prompts, max_new_tokens=5, logits_processor=[broken], **DRAFT_LENGTH)
    with pytest.raises(KeyError, match="mine"):
        generate(model, **prompts, max_new_tokens=5, stopping_criteria=[broken], **DRAFT_LENGTH)
    theirs, ours = both(model, prompts, max_new_tokens=5, do_sample=False)
    assert torch.equal(theirs, ours)


def test_a_model_in_float16_is_refused_on_a_cpu() -> None:
    with pytest.raises(ParameterError, match=r"torch.float32 or torch.bfloat16 on this device: model.to"):
        generate(model_of().half(), **padded([7, 3]), max_new_tokens=2)


def test_a_model_with_an_encoder_is_refused() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    heard = {"inputs": None, "input_features": torch.zeros(4, 80, 30), "assistant_model": model}  # Whisper's arguments
    for given in ({"inputs": torch.tensor([[3, 4]])}, heard):
        with pytest.raises(ParameterError, match="a decoder-only model") as raised:
            generate(model, **given, max_new_tokens=3)  # type: ignore[arg-type]
        assert raised.value.field == "model"


def test_stop_strings_end_as_in_transformers() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = tiny("llama", NATIVE["llama"][1] | {"vocab_size": len(tokenizer)})
    prompts = tokenizer(["abcabc", "xyxyxyxy"], padding=True, padding_side="left", return_tensors="pt")
    free = model.generate(**prompts, max_new_tokens=20, do_sample=False)
    stop = tokenizer.decode(free[0, -8:-6])
    fields = {"max_new_tokens": 20, "do_sample": False, "stop_strings": [stop], "tokenizer": tokenizer}
    theirs, ours = both(model, dict(prompts), **fields)
    assert torch.equal(theirs, ours)


def test_the_python_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With local random models in place of those from the hub."""
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    fields = NATIVE["llama"][1] | {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny("llama", fields))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    exec(compile(code, "transformers.md", "exec"), {})
    one, other, refused = capsys.readouterr().out.splitlines()
    assert one.startswith("[")
    assert other == "torch.Size([6, 61])"
    assert refused.startswith("num_beams=4")
