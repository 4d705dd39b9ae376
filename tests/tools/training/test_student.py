"""Distilled draft models: which weights they take from the target, what is trained, and the checkpoint on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from byte_model import byte_tokenizer
from paceline.config import DraftTraining, EngineOptions, SamplingParams
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.tools.training.acceptance import _correct
from paceline.tools.training.objective import counted_positions
from paceline.tools.training.student import spread, student_config, usual_layers
from paceline.tools.training.target import Target
from tools.training.conftest import SIZES
from tools.training.test_learn import OPTIONS, TAPS, first_batch, make_trainer
from tools.training.test_run import call

MODEL = DraftTraining(**{**vars(OPTIONS), "kind": "model", "layers": 3})


@pytest.fixture(scope="module")
def distilled(whole: Path, target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model trained on the data of the run ``whole``."""
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


def test_the_configuration_keeps_the_types_of_the_layers_taken() -> None:
    config = LlamaConfig(num_hidden_layers=4, quantization_config={"quant_method": "compressed-tensors"})
    config.layer_types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    found = student_config(config, [1, 3], tied=True)
    assert (found.num_hidden_layers, found.layer_types) == (2, ["sliding_attention", "full_attention"])
    assert found.architectures == ["LlamaForCausalLM"]
    assert found.tie_word_embeddings
    assert not hasattr(found, "quantization_config"), "the draft model is saved in bfloat16"
    assert config.num_hidden_layers == 4, "it is a copy"


@torch.no_grad()
def test_with_all_layers_its_distributions_are_the_targets(whole: Path, target: str) -> None:
    """Before training, at every position and step: so weights, positions and steps are the right ones."""
    training = DraftTraining(**{**vars(MODEL), "layers": 8, "vocab": 257})
    trainer = make_trainer(whole, target, training)
    batch = first_batch(trainer)
    begins, width = counted_positions(batch, 0), batch.tokens.shape[1]
    for step, normed in enumerate(trainer.head.drafts(batch.tokens, batch.features.float(), begins, 3)):
        place = counted_positions(batch, step)
        distribution = trainer.head.logits(normed[torch.isin(begins, place)]).softmax(-1)
        states = batch.hidden.flatten(0, 1)[place // (width - 1) * width + place % (width - 1) + 1 + step].float()
        assert (distribution - trainer.head.logits(states).softmax(-1)).abs().max() < 0.05


@torch.no_grad()
def test_measured_acceptance_is_that_of_drafting_token_by_token(whole: Path, target: str, tmp_path: Path) -> None:
    """Each draft token is predicted from the text and the draft tokens before it."""
    trainer = make_trainer(whole, target, MODEL)
    with torch.enable_grad():
        trainer.run(tmp_path / "checkpoint.safetensors")
    batch = next(trainer.held_out.batches([[0, 1, 2]]))
    correct, accepted = _correct(trainer.head, batch, trainer.scale), 0
    for row in range(3):
        for place in range(int(batch.prompts[row]) - 1, int(batch.lengths[row]) - 2):
            known = batch.tokens[row, : place + 2].tolist()
            for step in range(min(4, int(batch.lengths[row]) - 2 - place)):
                last = torch.tensor([len(known) - 2])
                *_, normed = trainer.head.drafts(torch.tensor([[*known, 0]]), torch.zeros(0), last, 1)
                draft_token = int(trainer.head.targets[trainer.head.logits(normed[0]).argmax()])
                assert int(correct[row, place, step]) == (draft_token == int(batch.tokens[row, place + 2 + step]))
                if draft_token != int(batch.tokens[row, place + 2 + step]):
                    break
                known.append(draft_token)
                accepted += 1
    assert accepted > 0


def test_untrained_weights_stay_the_targets(distilled: Path, target: str) -> None:
    """Embedding and output keep the target's weights, in a checkpoint that transformers loads."""
    model = AutoModelForCausalLM.from_pretrained(distilled, dtype=torch.bfloat16)
    source = Target.load(target, "model", 3)
    assert model.config.num_hidden_layers == 3
    assert torch.equal(model.get_input_embeddings().weight, source.embedding)
    assert torch.equal(model.get_output_embeddings().weight, source.output)
    first = dict(source.layers[0])["mlp.down_proj.weight"]
    assert not torch.equal(model.model.layers[0].mlp.down_proj.weight, first)
    assert "# A draft model for" in (distilled / "report.md").read_text()
    report = json.loads((distilled / "report.json").read_text())
    assert report["training"]["layers"] == 3
    assert report["acceptance"][-1]["length"][-1] > 1


def test_answers_with_the_draft_model_are_those_of_plain_decoding(distilled: Path, target: str) -> None:
    options: EngineOptions = {"dtype": "bfloat16", "device": "cpu", "threads": 1, "max_model_len": 96}
    llm = LLM(target, str(distilled), **options, drafter="model", num_speculative_tokens=4)
    params = [SamplingParams(temperature=heat, max_tokens=40, seed=5, ignore_eos=True) for heat in (0.0, 0.8)]
    found = llm.generate(["a b c", "why is the sky blue?"], params, use_tqdm=False)
    plain = llm.plain().generate(["a b c", "why is the sky blue?"], params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].metrics.accepted for each in found) > 0


def test_a_run_cannot_be_resumed_with_another_number_of_layers(distilled: Path, target: str) -> None:
    refused = call(target, *SIZES, "--kind", "model", "--layers", "2", "--output", str(distilled), "--resume")
    assert refused.exit_code == 2
    assert "--resume: layers" in refused.stderr


def test_qwen3_with_tied_embeddings_is_supported_and_other_families_are_refused(tmp_path: Path, target: str) -> None:
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    whole = Qwen3ForCausalLM(config).bfloat16()
    whole.save_pretrained(tmp_path / "target")
    source = Target.load(str(tmp_path / "target"), "model", 8)
    student = source.make_learner(DraftTraining(kind="model", layers=8), TAPS, torch.arange(len(tokenizer)), 0)
    student.save(tmp_path, source.output)  # type: ignore[operator, union-attr]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wanted = whole.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    assert again.config.tie_word_embeddings
    broken = json.loads((Path(target) / "config.json").read_text()) | {"model_type": "mistral"}
    shutil.copytree(target, tmp_path / "mistral")
    (tmp_path / "mistral" / "config.json").write_text(json.dumps(broken | {"architectures": ["MistralForCausalLM"]}))
    with pytest.raises(ParameterError, match="llama, qwen2, qwen3"):
        Target.load(str(tmp_path / "mistral"), "model")
