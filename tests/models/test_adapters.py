"""LoRA adapters: several in one batch, with and without drafts, equal to merged weights one by one; damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from adapter_support import EVERY_LINEAR, write_adapter
from model_support import FOREIGN, NATIVE, Runner, random_tokens, tiny
from models.test_huggingface import _SIGHTED
from paceline import LLM, SamplingParams
from paceline.errors import ModelFormatError, ParameterError
from paceline.models.load.adapters import AdapterRows, attach
from paceline.models.load.loading import describe_source, load_model
from paceline.models.torch.transformer import Transformer

PROMPTS = [[1, 2, 3, 1, 2], [7, 8, 9, 10, 7, 8], [5, 4, 5, 4, 5], [20, 21, 22, 20, 21]]
NAMES = ["red", None, "blue", "red"]
TOKENS = 16

Folder = tuple[Path, dict[str | None, PreTrainedModel]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A directory with a model, two adapters and a draft model, and the models with the adapters merged."""
    path = tmp_path_factory.mktemp("adapters")
    model = tiny(*NATIVE["llama with biases"])
    model.save_pretrained(path / "model")
    tiny(*NATIVE["llama"], seed=5).save_pretrained(path / "draft")
    merged = {
        None: model,
        "red": write_adapter(path / "red", model, seed=1),
        "blue": write_adapter(path / "blue", model, seed=2, rank=2, modules=("q_proj", "up_proj"), use_rslora=True),
    }
    return path, merged


def expected(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return made[0, len(prompt) :].tolist()


def load(path: Path, **options: Any) -> LLM:
    tokenless: dict[str, Any] = {"dtype": "float32", "max_batch_size": 4, "max_model_len": 48, "use_tqdm": False}
    adapters = {"red": path / "red", "blue": path / "blue"}
    return LLM(load_model_of(path / "model"), **{"adapters": adapters} | tokenless | options)


def load_model_of(path: Path) -> PreTrainedModel:
    """Load without a tokenizer, which the tiny models lack."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def params(name: str | None, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, adapter=name, **fields)


def answers(llm: LLM, names: list[str | None] = NAMES, **fields: Any) -> list[list[int]]:
    made = llm.generate(PROMPTS, [params(name, **fields) for name in names], use_tqdm=False)
    return [output.outputs[0].token_ids for output in made]


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "hybrid"])
def test_rows_with_different_adapters_equal_the_merged_models_one_by_one(drafter: str, folder: Folder) -> None:
    path, merged = folder
    draft = load_model_of(path / "draft") if drafter in ("model", "hybrid") else None
    k = 0 if drafter == "none" else 3
    llm = load(path, draft_model=draft, drafter=None if drafter == "none" else drafter, num_speculative_tokens=k)
    found = answers(llm)
    assert found == [expected(merged[name], prompt) for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    assert len({tuple(expected(merged[name], PROMPTS[0])) for name in merged}) == 3, "adapters change nothing"
    llm.close()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_two_of_three_rows_with_adapters_of_peft_equal_transformers_with_peft_one_by_one(
    drafter: str, folder: Folder, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft writes and runs the adapters")
    path, _ = folder
    random = {"lora_alpha": 24, "init_lora_weights": False}
    every = peft.LoraConfig(r=4, target_modules=list(EVERY_LINEAR), **random)
    some = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "up_proj"], use_rslora=True, **random)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        theirs = peft.get_peft_model(load_model_of(path / "model"), every, adapter_name="red")
        theirs.add_adapter("blue", some)
    theirs.save_pretrained(tmp_path)
    wanted = {}
    for name in ("red", "blue"):
        theirs.set_adapter(name)
        wanted[name] = [expected(theirs, prompt) for prompt in PROMPTS]
    with theirs.disable_adapter():
        wanted[None] = [expected(theirs, prompt) for prompt in PROMPTS]
    assert len({tuple(texts[0]) for texts in wanted.values()}) == 3, "adapters change nothing"
    options = {} if drafter == "none" else {"num_speculative_tokens": 3}
    options |= {"draft_model": load_model_of(path / "draft")} if drafter == "model" else {}
    chosen = None if drafter == "none" else drafter
    adapters = {name: tmp_path / name for name in ("red", "blue")}
    llm = load(path, drafter=chosen, adapters=adapters, max_batch_size=3, **options)
    for names in (["red", None, "blue"], ["blue", "red", None]):
        made = llm.generate(PROMPTS[:3], [params(name) for name in names], use_tqdm=False)
        found = [output.outputs[0].token_ids for output in made]
        assert found == [wanted[name][row] for row, name in enumerate(names)]
    llm.close()


def test_a_cached_prefix_is_used_by_its_own_adapter_only(folder: Folder) -> None:
    path, merged = folder
    llm = load(path, drafter=None, num_speculative_tokens=0, max_batch_size=1)
    prompt = list(range(3, 30))
    for name in ("red", None, "blue", "red", None):
        (made,) = llm.generate([prompt], params(name), use_tqdm=False)
        assert made.outputs[0].token_ids == expected(merged[name], prompt)
        assert made.outputs[0].metrics.cached_tokens == 0
    (again,) = llm.generate([prompt], params(None), use_tqdm=False)
    assert again.outputs[0].metrics.cached_tokens == len(prompt) - 1
    llm.close()


def test_sampled_text_is_that_of_the_row_alone(folder: Folder) -> None:
    path, _ = folder
    llm = load(path, drafter="ngram", num_speculative_tokens=3)
    sampled = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS, ignore_eos=True, adapter=name)
        for seed, name in enumerate(NAMES)
    ]
    together = llm.generate(PROMPTS, sampled, use_tqdm=False)
    alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in zip(PROMPTS, sampled, strict=True)]
    assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in alone]
    llm.close()


def test_heads_whose_neighbours_turn_together_are_changed_in_their_order(tmp_path: Path) -> None:
    theirs, tokens = tiny(*NATIVE["ernie4_5"]), random_tokens(1, 12)
    merged, ours = write_adapter(tmp_path / "red", theirs, seed=1), load_model(theirs, dtype=torch.float32)
    attach(ours, {"red": tmp_path / "red"}, describe_source(theirs))
    assert isinstance(ours, Transformer)
    assert ours.adapters is not None
    ours.adapters.use(torch.tensor([1]))
    with torch.no_grad():
        wanted = merged(tokens).logits
    assert (Runner(ours, 1)(tokens, torch.arange(12)[None]) - wanted).abs().max() < 1e-3


def test_an_unknown_adapter_is_refused(folder: Folder) -> None:
    path, _ = folder
    llm = load(path, drafter=None, num_speculative_tokens=0)
    with pytest.raises(ParameterError, match="adapter='green' is not allowed: one of red, blue"):
        llm.generate([PROMPTS[0]], params("green"), use_tqdm=False)
    llm.close()


def test_prompt_logprobs_are_those_of_the_adapter(folder: Folder) -> None:
    path, merged = folder
    llm = load(path, drafter=None, num_speculative_tokens=0)
    asked = [params(name, prompt_logprobs=1) for name in ("red", None, "blue")]
    for prompt in (PROMPTS[1], PROMPTS[1]):  # the second time from cached prefixes
        outputs = llm.generate([prompt] * 3, asked, use_tqdm=False)
        for one, output in zip(asked, outputs, strict=True):
            with torch.no_grad():
                logits = merged[one.adapter](torch.tensor([prompt])).logits[0, :-1]
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
            found = [token.logprob for token in output.prompt_logprobs or () if token is not None]
            assert found == pytest.approx(wanted, abs=1e-4)
    llm.close()


@pytest.mark.parametrize(
    ("option", "value"), [("quantization", "int8"), ("attention", "native"), ("deterministic", True)]
)
def test_options_that_adapters_do_not_go_with_are_refused(option: str, value: object, folder: Folder) -> None:
    with pytest.raises(ParameterError, match=option):
        load(folder[0], **{option: value})


@pytest.mark.parametrize("adapters", [3, ["red"], {"": "x"}, {"a\0b": "x"}, {3: "x"}, {"red": 3}])
def test_adapters_are_names_with_directories(adapters: Any, folder: Folder) -> None:
    with pytest.raises(ParameterError, match="adapters"):
        LLM(load_model_of(folder[0] / "model"), adapters=adapters, use_tqdm=False)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (FOREIGN["gpt_neox"], "which runs through transformers' own code; merge the adapter"),
        (NATIVE["youtu"], "which has latent attention; merge the adapter"),
        (NATIVE["granite_swa"], "which has attention sinks; merge"),
    ],
)
def test_a_model_without_adapters_is_refused_with_the_reason(model: tuple[str, dict[str, Any]], why: str) -> None:
    theirs = tiny(*model)
    spec = None if model == FOREIGN["gpt_neox"] else describe_source(theirs)
    with pytest.raises(ParameterError, match=why):
        attach(load_model(theirs, dtype=torch.float32), {"x": Path("nowhere")}, spec)


def test_rows_of_another_thread_have_no_adapter() -> None:
    from threading import Thread

    rows, found = AdapterRows(), list[torch.Tensor | None]()
    rows.numbers = torch.tensor([1, 0, 2])
    thread = Thread(target=lambda: found.append(rows.numbers))
    thread.start()
    thread.join()
    assert found == [None]


def test_a_change_of_keys_that_are_also_values_changes_both(tmp_path: Path) -> None:
    model = tiny(*NATIVE["gemma4 with keys as values"])
    merged = write_adapter(tmp_path / "red", model, seed=1, modules=("k_proj",))
    ours = load_model(model, dtype=torch.float32)
    attach(ours, {"red": tmp_path / "red"}, describe_source(model))
    assert isinstance(ours, Transformer)
    assert ours.adapters is not None
    tokens = random_tokens(1, 12)
    ours.adapters.use(torch.tensor([1]))
    found = Runner(ours, 1)(tokens, torch.arange(12)[None])
    with torch.no_grad():
        assert (found - merged(tokens).logits).abs().max() < 1e-4
        assert (found - model(tokens).logits).abs().max() > 1e-2


@torch.no_grad()
def test_an_adapter_of_a_multimodal_model_changes_its_text_model(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model("gemma3", **_SIGHTED)).eval()
    theirs.save_pretrained(tmp_path / "model")
    merged = write_adapter(tmp_path / "red", theirs, seed=1, modules=("gate_proj",))  # the text model's alone
    ours = load_model(tmp_path / "model", dtype=torch.float32)
    attach(ours, {"red": tmp_path / "red"}, describe_source(tmp_path / "model"))
    assert isinstance(ours, Transformer)
    assert ours.adapters is not None
    tokens = random_tokens(1, 12)
    ours.adapters.use(torch.tensor([1]))
    found = Runner(ours, 1)(tokens, torch.arange(12)[None])
    assert (found - merged(tokens).logits).abs().max() < 1e-3
    assert (found - theirs(tokens).logits).abs().max() > 1e-2


# Damaged files

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return damage


def _settings(**changes: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda path: (path / "adapter_config.json").unlink(), "no adapter_config.json"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "truncated": (
        lambda path: (path / "adapter_model.safetensors").write_bytes(b"\x10" * 20),
        "broken or truncated safetensors",
    ),
    "another method": (_settings(peft_type="IA3"), "peft_type='IA3'"),
    "dora": (_settings(use_dora=True), "use_dora=True is not supported"),
    "another start": (_settings(init_lora_weights="pissa_niter_4"), "'pissa_niter_4' changes the model's own weights"),
    "whole modules": (_settings(modules_to_save=["lm_head"]), "modules_to_save"),
    "alpha as text": (_settings(lora_alpha="8"), "lora_alpha='8' is not a number"),
    "infinite alpha": (_settings(lora_alpha=float("inf")), "lora_alpha=inf"),
    "a layer with and without peft's prefix": (
        _tensors(lambda t: t.update({f"{Q}A.weight".removeprefix("base_model.model."): torch.ones(4, 24)})),
        r"q_proj\.lora_A\.weight is there under two names",
    ),
    "a layer with and without the model's prefix": (
        _tensors(
            lambda t: t.update({f"{Q}{side}.weight".replace("model.model.", "model."): torch.ones(1) for side in "AB"})
        ),
        r"layers\.0\.self_attn\.q_proj and .*layers\.0\.self_attn\.q_proj are the same weight under two names",
    ),
    "half a pair": (_tensors(lambda t: t.pop(f"{Q}A.weight")), r"q_proj has one of lora_A and lora_B alone"),
    "another rank": (_tensors(lambda t: t.update({f"{Q}A.weight": torch.ones(3, 24)})), r"matrices of \(3, 24\)"),
    "another width": (_tensors(lambda t: t.update({f"{Q}A.weight": torch.ones(4, 25)})), r"matrices of \(4, 25\)"),
    "one dimension": (_tensors(lambda t: t.update({f"{Q}A.weight": torch.ones(4)})), r"matrices of \(4,\)"),
    "no rank": (_tensors(lambda t: t.update({f"{Q}A.weight": torch.ones(0, 24)})), r"matrices of \(0, 24\)"),
    "an unknown layer": (
        _tensors(lambda t: t.update({Q.replace("layers.0", "layers.9") + "A.weight": torch.ones(4, 24)})),
        r"layers\.9\.self_attn\.q_proj is no linear layer",
    ),
    "a norm": (
        _tensors(lambda t: t.update({"base_model.model.model.norm.lora_A.weight": torch.ones(4, 24)})),
        r"model\.norm is no linear layer",
    ),
    "the embedding": (
        _tensors(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 61)})),
        r"lora_embedding_A is not a matrix of LoRA",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_by_name(how: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[how]
    model = tiny(*NATIVE["llama"])
    write_adapter(tmp_path / "red", model, seed=1)
    damage(tmp_path / "red")
    with pytest.raises(ModelFormatError, match=message) as caught:
        attach(load_model(model, dtype=torch.float32), {"red": tmp_path / "red"}, describe_source(model))
    assert "red" in str(caught.value)
