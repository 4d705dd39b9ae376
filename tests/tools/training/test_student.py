"""A draft model that is distilled from its target: what it takes, what is learnt of it, what is left of it on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from cli.conftest import make_tokenizer
from paceline.config import DraftTraining, EngineOptions, SamplingParams
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.tools.training.acceptance import _correct
from paceline.tools.training.objective import counted_positions
from paceline.tools.training.student import spread, student_config, usual_layers
from paceline.tools.training.target import Target
from tools.training.conftest import SIZES
from tools.training.test_command import call
from tools.training.test_learning import OPTIONS, TAPS, first_batch, make_trainer

MODEL = DraftTraining(**{**vars(OPTIONS), "kind": "model", "layers": 3})


@pytest.fixture(scope="module")
def distilled(whole: Path, target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the data of the whole run."""
    output = tmp_path_factory.mktemp("students") / "of-tiny"
    shutil.copytree(whole / "data", output / "data")
    done = call(target, *SIZES, "--kind", "model", "--layers", "3", "--output", str(output), "--resume")
    assert done.exit_code == 0, done.stderr
    return output


def test_layers_are_taken_evenly_from_the_first_to_the_last() -> None:
    assert spread(30, 4) == [0, 10, 19, 29]
    assert spread(8, 8) == list(range(8))
    assert spread(8, 1) == [0]
    assert [usual_layers(layers) for layers in (1, 2, 8, 28, 80)] == [1, 2, 2, 4, 10]


def test_a_configuration_with_fewer_layers_knows_which_these_are() -> None:
    config = LlamaConfig(num_hidden_layers=4)
    config.layer_types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    found = student_config(config, [1, 3], tied=True)
    assert (found.num_hidden_layers, found.layer_types) == (2, ["sliding_attention", "full_attention"])
    assert found.architectures == ["LlamaForCausalLM"]
    assert found.tie_word_embeddings
    assert config.num_hidden_layers == 4, "it is a copy"


@torch.no_grad()
def test_with_all_layers_it_says_what_its_target_says(whole: Path, target: str) -> None:
    """Before anything was learnt, at every place and step: so weights, places and steps are the right ones."""
    training = DraftTraining(**{**vars(MODEL), "layers": 8, "vocab": 257})
    trainer = make_trainer(whole, target, training)
    batch = first_batch(trainer)
    for step, normed in enumerate(trainer.head.drafts(batch.tokens, batch.features.float(), 3)):
        place = counted_positions(batch, step)
        distribution = trainer.head.logits(normed.flatten(0, 1)[place]).softmax(-1)
        width = batch.tokens.shape[1]
        states = batch.hidden.flatten(0, 1)[place // (width - 1) * width + place % (width - 1) + 1 + step].float()
        assert (distribution - trainer.head.logits(states).softmax(-1)).abs().max() < 0.05


@torch.no_grad()
def test_its_acceptance_is_what_drafting_gives(whole: Path, target: str, tmp_path: Path) -> None:
    """Draft tokens that it draws one after the other, each from the text and those before it."""
    trainer = make_trainer(whole, target, MODEL)
    with torch.enable_grad():
        trainer.run(tmp_path / "checkpoint.safetensors")
    batch = next(trainer.held.batches([[0, 1, 2]]))
    right, kept = _correct(trainer.head, batch, trainer.scale), 0
    for row in range(3):
        for place in range(int(batch.prompts[row]) - 1, int(batch.lengths[row]) - 2):
            known = batch.tokens[row, : place + 2].tolist()
            for step in range(min(4, int(batch.lengths[row]) - 2 - place)):
                *_, normed = trainer.head.drafts(torch.tensor([[*known, 0]]), torch.zeros(0), 1)
                draft_token = int(trainer.head.targets[trainer.head.logits(normed[0, len(known) - 2]).argmax()])
                assert int(right[row, place, step]) == (draft_token == int(batch.tokens[row, place + 2 + step]))
                if draft_token != int(batch.tokens[row, place + 2 + step]):
                    break
                known.append(draft_token)
                kept += 1
    assert kept > 0


def test_what_is_not_learnt_stays_the_targets(distilled: Path, target: str) -> None:
    """Embedding and output; transformers reads the checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(distilled, dtype=torch.bfloat16)
    learnt = Target.load(target, "model", 3)
    assert model.config.num_hidden_layers == 3
    assert torch.equal(model.get_input_embeddings().weight, learnt.embedding)
    assert torch.equal(model.get_output_embeddings().weight, learnt.rows)
    first = dict(learnt.layers[0])["mlp.down_proj.weight"]
    assert not torch.equal(model.model.layers[0].mlp.down_proj.weight, first)
    assert "# A draft model for" in (distilled / "report.md").read_text()
    told = json.loads((distilled / "report.json").read_text())
    assert told["training"]["layers"] == 3
    assert told["acceptance"][-1]["length"][-1] > 1


def test_it_drafts_and_the_answers_are_those_of_plain_decoding(distilled: Path, target: str) -> None:
    options: EngineOptions = {"dtype": "bfloat16", "device": "cpu", "threads": 1, "max_model_len": 96}
    llm = LLM(target, str(distilled), **options, drafter="model", num_speculative_tokens=4)
    params = [SamplingParams(temperature=heat, max_tokens=40, seed=5, ignore_eos=True) for heat in (0.0, 0.8)]
    found = llm.generate(["a b c", "why is the sky blue?"], params, use_tqdm=False)
    plain = llm.plain().generate(["a b c", "why is the sky blue?"], params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].metrics.accepted for each in found) > 0


def test_a_run_goes_on_with_as_many_layers_as_it_began_with(distilled: Path, target: str) -> None:
    refused = call(target, *SIZES, "--kind", "model", "--layers", "2", "--output", str(distilled), "--resume")
    assert refused.exit_code == 2
    assert "--resume: layers" in refused.stderr


def test_a_target_of_qwen3_with_a_tied_output_is_taken_apart_and_others_are_refused(
    tmp_path: Path, target: str
) -> None:
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    whole = Qwen3ForCausalLM(config).bfloat16()
    whole.save_pretrained(tmp_path / "target")
    learnt = Target.load(str(tmp_path / "target"), "model", 8)
    student = learnt.make_learner(DraftTraining(kind="model", layers=8), TAPS, torch.arange(len(tokenizer)), 0)
    student.save(tmp_path, learnt.rows)  # type: ignore[operator, union-attr]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wanted = whole.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    assert again.config.tie_word_embeddings
    broken = json.loads((Path(target) / "config.json").read_text()) | {"model_type": "mistral"}
    shutil.copytree(target, tmp_path / "mistral")
    (tmp_path / "mistral" / "config.json").write_text(json.dumps(broken | {"architectures": ["MistralForCausalLM"]}))
    with pytest.raises(ParameterError, match="llama, qwen2, qwen3"):
        Target.load(str(tmp_path / "mistral"), "model")
