"""Hidden transfer heads: the layers above the maps are the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_support import NATIVE, random_tokens, tiny
from paceline.config import DraftTraining
from paceline.drafters.heads.layers import UnrolledAttention
from paceline.errors import ParameterError
from paceline.models.load.loading import load_model
from paceline.tools.training.hidden_states import HiddenStateReader
from paceline.tools.training.target import Target

TAPS = (2, 4, 5)
OPTIONS = DraftTraining(kind="hidden_transfer", vocab=20)


def saved(name: str, directory: Path) -> str:
    family, fields = NATIVE[name]
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    tiny(family, fields | {depth: 8}).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    "name", ["llama with biases", "llama with llama3 rope", "mistral", "qwen2", "qwen3", "qwen3 with biases"]
)
def test_the_head_computes_what_the_targets_last_layers_compute(name: str, tmp_path: Path) -> None:
    target = Target.load(saved(name, tmp_path), OPTIONS.kind)
    config = target.shape(TAPS, OPTIONS)
    assert len(config.decoder.layers) == 8 - TAPS[-1]
    head = target.head(config, torch.arange(20), seed=0)
    model = load_model(str(tmp_path), dtype=torch.float32)
    tokens = random_tokens(1, 12)
    (outputs,) = HiddenStateReader(model, TAPS, 12, threads=1).read(tokens.tolist())
    positions = torch.arange(12)[None]
    with torch.no_grad():
        hidden = head.step(tokens, head.fuse(outputs.features[None].float()), positions, UnrolledAttention()).normed[0]
    assert float((hidden - outputs.hidden.float()).abs().max()) < 0.03 * float(hidden.abs().max())


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_a_target_with_learned_positions_is_refused_for_a_head_that_reads_embeddings(name: str, tmp_path: Path) -> None:
    target = Target.load(saved(name, tmp_path), "chimera")
    with pytest.raises(ParameterError, match="learned positions"):
        target.shape(TAPS, DraftTraining(kind="chimera", vocab=20))


@pytest.mark.parametrize("name", ["mistral with a window", "opt", "gpt2", "opt without biases or norm weights"])
def test_a_target_with_other_layers_is_refused(name: str, tmp_path: Path) -> None:
    target = Target.load(saved(name, tmp_path), OPTIONS.kind)
    with pytest.raises(ParameterError, match="layers as Llama, Qwen2 or Qwen3 have them"):
        target.shape(TAPS, OPTIONS)
