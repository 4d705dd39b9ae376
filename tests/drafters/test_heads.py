"""Trained heads: reading of both layouts, refusal of wrong ones, and results as the format defines them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from head_support import (
    CHIMERA,
    DRAFTED,
    PARALLEL,
    TRANSFER,
    TRANSFERS,
    VOCABULARY,
    WIDTH,
    Reading,
    flat_config,
    flat_names,
    layers,
    random_chimera,
    random_head,
    random_transfer,
    read_step_by_step,
    reading_of,
    speculators_config,
    write,
)
from paceline.drafters.heads.checkpoint import is_head, load_head, read_head_config, save_head
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.feature import FeatureHead
from paceline.drafters.heads.head import Head
from paceline.errors import ModelFormatError, ParameterError
from paceline.llm import LLM
from paceline.models.files.hub import resolve

LENGTH = 7
THETA = {"rope_theta": 500.0}
WINDOWED = {
    "model_type": "qwen3",
    "head_dim": WIDTH // 4,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention"],
}


def loaded(path: Path, embedding: Tensor | None = None) -> Head:
    return load_head(path, dtype=torch.float32, embedding=embedding)


def text(width: int = WIDTH, tap_count: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)
    return tokens, torch.randn(1, LENGTH, tap_count, width, generator=generator)


def unrolled(head: Head, tokens: Tensor, features: Tensor, steps: int = 3) -> list[Tensor]:
    """Logits [T - step, Vd] of each step; the last positions of a later step have no meaning."""
    found = head.unroll(tokens, features, steps)
    return [logits[0, : LENGTH - step] for step, logits in enumerate(found)]


@pytest.mark.parametrize(
    ("switches", "shape", "made"),
    [
        ((), {}, {}),
        (("norm_before_residual",), {}, {}),
        (("norm_before_fc", "norm_output"), {}, {}),
        (("fc_norm", "norm_output", "norm_before_residual"), {}, {}),
        ((), {"model_type": "qwen3", "head_dim": WIDTH // 4}, {"qk_norm": True}),
        (("norm_output",), {"num_hidden_layers": 2}, {"depth": 2}),
        ((), {}, {"target_width": 32}),
        ((), WINDOWED | {"sliding_window": 2}, {"qk_norm": True}),
        ((), WINDOWED | {"sliding_window": 3}, {"qk_norm": True}),
        ((), {}, {"parallel": True}),
        (("fc_norm",), {"num_hidden_layers": 2}, {"parallel": True, "depth": 2}),
        (("norm_before_fc",), {}, {"parallel": True, "target_width": 32}),
    ],
    ids=[
        "plain",
        "normed residual",
        "before fc",
        "3.1",
        "qwen3",
        "two layers",
        "wider target",
        "window 2",
        "window 3",
        "parallel",
        "parallel, two layers",
        "parallel, before fc",
    ],
)
def test_a_head_computes_what_the_format_defines(
    tmp_path: Path, switches: tuple[str, ...], shape: dict[str, Any], made: dict[str, Any]
) -> None:
    tensors = random_head(switches=switches, **made)
    width = made.get("target_width", WIDTH)
    fields = dict.fromkeys(switches, True) | {"target_hidden_size": width}
    fields |= PARALLEL if made.get("parallel") else {}
    head = loaded(write(tmp_path, speculators_config(layers(**shape, **THETA), **fields), tensors))
    tokens, features = text(width)
    reading = Reading(tensors, switches, theta=500.0, window=shape.get("sliding_window", 0))
    expected = read_step_by_step(reading, tokens[0].tolist(), features[0], 3)
    for ours, theirs in zip(unrolled(head, tokens, features), expected, strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "shape", "made"),
    [
        (TRANSFER, {"num_hidden_layers": 2}, {"depth": 2}),
        (TRANSFER, {"model_type": "qwen2", "head_dim": WIDTH // 4}, {"biased": True}),
        (TRANSFER, {"model_type": "qwen3", "head_dim": WIDTH // 4}, {"qk_norm": True}),
        (CHIMERA, {}, {}),
        (CHIMERA, {"num_hidden_layers": 2}, {"depth": 2}),
        (CHIMERA, WINDOWED | {"sliding_window": 2}, {"qk_norm": True}),
    ],
    ids=["two layers", "qwen2", "qwen3", "chimera", "chimera, two layers", "chimera, window 2"],
)
def test_heads_of_our_own_kinds_compute_what_their_papers_describe(
    tmp_path: Path, kind: dict[str, Any], shape: dict[str, Any], made: dict[str, Any]
) -> None:
    """Also after the head was written and read again."""
    chimera = kind is CHIMERA
    tensors = random_chimera(**made) if chimera else random_transfer(**made)
    fields = kind | {"eagle_aux_hidden_state_layer_ids": [0, 9] if chimera else [3]}
    head = loaded(write(tmp_path / "one", speculators_config(layers(**shape, **THETA), **fields), tensors))
    save_head(head, tmp_path / "two")
    tokens, features = text(tap_count=1 + chimera)
    for place in (0, 5, LENGTH - 1):
        reading = reading_of(tensors, theta=500.0, window=shape.get("sliding_window", 0))
        state, logits = reading.text(tokens[0, : place + 1].tolist(), list(features[0]))
        for step, ours in enumerate(head.unroll(tokens, features, 8)):
            torch.testing.assert_close(ours[0, place], logits, rtol=1e-4, atol=1e-4)
            state, logits = reading.after(0, state, place + 1 + step)
        assert step == TRANSFERS - 1
    again = loaded(tmp_path / "two", embedding=tensors["embed_tokens.weight"])
    assert again.config == head.config
    assert torch.equal(next(again.unroll(tokens, features, 1)), next(head.unroll(tokens, features, 1)))


def test_both_layouts_of_the_same_weights_give_the_same_logits(tmp_path: Path) -> None:
    tensors = random_head(switches=["fc_norm"])
    one = loaded(write(tmp_path / "one", speculators_config(layers(), fc_norm=True), tensors))
    flat = flat_names(tensors)
    other = loaded(write(tmp_path / "other", flat_config(layers(), fc_norm=True), flat))
    tokens, features = text()
    for ours, theirs in zip(unrolled(one, tokens, features), unrolled(other, tokens, features), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(one.targets, other.targets)


def test_the_usual_rope_has_a_base_of_ten_thousand(tmp_path: Path) -> None:
    path = write(tmp_path, flat_config(layers()), flat_names(random_head()))
    rotary = read_head_config(path).decoder.layers[0].attention.rotary
    assert rotary == loaded(path).config.decoder.layers[0].attention.rotary
    assert rotary is not None
    assert rotary.inverse_frequencies[1] == pytest.approx(10000 ** (-1 / 3))


def test_a_written_head_is_read_again_and_has_the_layout_of_speculators(tmp_path: Path) -> None:
    tensors = random_head(switches=["fc_norm"])
    config = speculators_config(layers(**THETA), fc_norm=True, norm_output=True, paceline={"paying_rows": {"cpu": 2}})
    head = loaded(write(tmp_path / "one", config, tensors))
    save_head(head, tmp_path / "two")
    again = loaded(tmp_path / "two", embedding=tensors["embed_tokens.weight"])
    assert again.config == head.config
    assert {name: tensor.tolist() for name, tensor in again.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in head.state_dict().items()
    }
    written = json.loads((tmp_path / "two" / "config.json").read_text())
    assert written["speculators_config"] == config["speculators_config"]
    assert written["transformer_layer_config"] == config["transformer_layer_config"]
    assert written["architectures"] == ["Eagle3Speculator"]
    assert written["paceline"] == {"paying_rows": {"cpu": 2}}


def test_the_shipped_head_names_the_batch_size_up_to_which_it_pays() -> None:
    assert read_head_config(resolve("smollm2-135m-head")).paying_rows == {"cpu": 2}


def test_a_written_parallel_head_is_read_again_and_has_the_layout_of_speculators(tmp_path: Path) -> None:
    tensors = random_head(parallel=True)
    head = loaded(write(tmp_path / "one", speculators_config(layers(), **PARALLEL), tensors))
    save_head(head, tmp_path / "two")
    again = loaded(tmp_path / "two", embedding=tensors["embed_tokens.weight"])
    assert again.config == head.config
    assert isinstance(again, FeatureHead)
    assert again.mask_hidden is not None
    assert torch.equal(again.mask_hidden, tensors["mask_hidden"])
    written = json.loads((tmp_path / "two" / "config.json").read_text())
    assert {name: written[name] for name in PARALLEL} == PARALLEL
    assert written["speculators_config"]["algorithm"] == "peagle"


def test_a_head_without_output_rows_takes_the_targets(tmp_path: Path) -> None:
    tensors = random_head()
    head = loaded(write(tmp_path / "one", speculators_config(layers(**THETA)), tensors))
    rows = torch.randn(VOCABULARY, WIDTH)
    head.lm_head.weight.copy_(rows[head.targets])
    save_head(head, tmp_path / "two", output=False)
    embedding = tensors["embed_tokens.weight"]
    with pytest.raises(ModelFormatError, match=r"lacks lm_head.weight; it is the target's"):
        loaded(tmp_path / "two", embedding)
    again = load_head(tmp_path / "two", dtype=torch.float32, embedding=embedding, output=lambda: rows)
    assert torch.equal(again.lm_head.weight, head.lm_head.weight)
    with pytest.raises(ModelFormatError, match="outside of the target's"):
        load_head(tmp_path / "two", dtype=torch.float32, embedding=embedding, output=lambda: rows[:DRAFTED])


def test_a_head_without_an_embedding_takes_the_targets(tmp_path: Path) -> None:
    tensors = random_head()
    embedding = tensors.pop("embed_tokens.weight")
    path = write(tmp_path, flat_config(layers()), flat_names(tensors))
    assert torch.equal(loaded(path, embedding).embed_tokens.weight, embedding)
    with pytest.raises(ModelFormatError, match=r"lacks embed_tokens.weight; it is the target's"):
        loaded(path)


def test_a_vocabulary_that_is_not_cut_needs_no_tables(tmp_path: Path) -> None:
    tensors = random_head(drafted=VOCABULARY)
    del tensors["d2t"], tensors["t2d"]
    head = loaded(write(tmp_path, speculators_config(layers(), draft_vocab_size=VOCABULARY), tensors))
    assert head.targets.tolist() == list(range(VOCABULARY))
    assert bool(head.t2d.all())


def test_the_vocabulary_tables_follow_from_each_other() -> None:
    head = FeatureHead(HeadConfig({"model_type": "llama", **layers()}, WIDTH, 3))
    head.set_vocabulary(torch.tensor([4, 9, 60]))
    assert head.targets.tolist() == [4, 9, 60]
    assert head.t2d.nonzero().flatten().tolist() == [4, 9, 60]


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        ({}, (2, 8, 13)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, (1, 5, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 12]}}, (2, 8, 13)),
    ],
    ids=["usual", "entering", "left"],
)
def test_layers_are_named_by_their_inputs(fields: dict[str, Any], taps: tuple[int, ...]) -> None:
    """An eagle_config names layers by their outputs, which are the inputs of the next layers."""
    assert HeadConfig.read(flat_config(layers(), **fields))[0].taps_of(16) == taps


def test_a_target_with_too_few_layers_is_refused() -> None:
    config, _ = HeadConfig.read(flat_config(layers(), eagle_aux_hidden_state_layer_ids=[1, 5, 9]))
    with pytest.raises(ModelFormatError, match=r"layers \(1, 5, 9\); this target has 9 layers, 0 to 8"):
        config.taps_of(9)


def test_a_chimera_head_reads_the_last_hidden_state_of_its_target() -> None:
    config, _ = HeadConfig.read(residual())
    assert config.taps_of(9) == (0, 9)
    with pytest.raises(ModelFormatError, match=r"layers \(0, 9\); this target has 10 layers"):
        config.taps_of(10)


def transferring(shape: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The configuration of a hidden transfer head."""
    return speculators_config(shape or layers(), **TRANSFER | {"eagle_aux_hidden_state_layer_ids": [3]} | fields)


def residual(**fields: Any) -> dict[str, Any]:
    """The configuration of a Chimera head."""
    return speculators_config(layers(), **CHIMERA | {"eagle_aux_hidden_state_layer_ids": [0, 9]} | fields)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": (speculators_config(layers(), speculators_model_type="mlp"), "mlp heads are not supported"),
    "no kind": (speculators_config(layers(), speculators_model_type="eagle9"), "'eagle9' is unknown"),
    "a model": ({"architectures": ["LlamaForCausalLM"], **layers()}, "not of a head"),
    "another architecture": (flat_config(layers(), architectures=["Eagle2Llama"]), "'Eagle2Llama' is not supported"),
    "other layers": (speculators_config(layers(model_type="gpt2")), "model_type 'gpt2'"),
    "one hidden state": (flat_config(layers(), eagle_config={"use_aux_hidden_state": False}), "EAGLE-1"),
    "many flat layers": (flat_config(layers(num_hidden_layers=2)), "num_hidden_layers=2"),
    "both norms": (speculators_config(layers(), fc_norm=True, norm_before_fc=True), "both norm_before_fc and fc_norm"),
    "quantised": (speculators_config(layers(), quantization_config={"bits": 4}), "quantised"),
    "a wide vocabulary": (speculators_config(layers(), draft_vocab_size=99), "draft_vocab_size 99"),
    "heads that do not divide": (speculators_config(layers(num_key_value_heads=3)), "4 heads over 3"),
    "a layer twice": (
        speculators_config(layers(), eagle_aux_hidden_state_layer_ids=[1, 1, 2]),
        "hidden states of layers",
    ),
    "no list": (speculators_config(layers(), eagle_aux_hidden_state_layer_ids=7), "must be a list, not 7"),
    "no number": (speculators_config(layers(), target_hidden_size="wide"), "must be a whole number"),
    "a flag of words": (speculators_config(layers(), norm_output="yes"), "must be true or false"),
    "no mask": (speculators_config(layers(), speculators_model_type="peagle"), "lacks mask_token_id"),
    "a mask outside": (speculators_config(layers(), **PARALLEL | {"mask_token_id": 61}), "mask_token_id 61"),
    "a mask of words": (speculators_config(layers(), **PARALLEL | {"mask_token_id": "x"}), "must be a whole number"),
    "no mask's state": (speculators_config(layers(), **PARALLEL), "lacks mask_hidden"),
    "a flat parallel one": (flat_config(layers(), ptd_token_id=3), "ptd_token_id: parallel heads are supported only"),
    "no transfers": (transferring(transfers=None), "lacks transfers"),
    "no draft token": (transferring(transfers=0), "transfers of the head's configuration is 1 to"),
    "transfers of several layers": (transferring(eagle_aux_hidden_state_layer_ids=[1, 2]), "settings of other kinds"),
    "transfers of the usual layers": (transferring(eagle_aux_hidden_state_layer_ids=None), "settings of other kinds"),
    "transfers and switches": (transferring(norm_output=True), "settings of other kinds"),
    "transfers into windows": (transferring(layers(**WINDOWED, sliding_window=3)), "settings of other kinds"),
    "no residual heads": (residual(residual_heads=None), "lacks residual_heads"),
    "no residual head": (residual(residual_heads=0), "residual_heads of the head's configuration is 1 to"),
    "residual heads of the usual layers": (residual(eagle_aux_hidden_state_layer_ids=None), "settings of other kinds"),
    "residual heads without an embedding": (
        residual(eagle_aux_hidden_state_layer_ids=[1, 9]),
        "settings of other kinds",
    ),
    "residual heads and switches": (residual(fc_norm=True), "settings of other kinds"),
    "residual heads of another width": (residual(target_hidden_size=32), "settings of other kinds"),
    "no rows": (speculators_config(layers(), paceline={"paying_rows": {"cpu": 0}}), "from 1 up, not {'cpu': 0}"),
    "rows of words": (speculators_config(layers(), paceline={"paying_rows": {"cpu": "2"}}), "whole number"),
    "rows of nothing": (speculators_config(layers(), paceline=2), "must be an object, not 2"),
    "no size": (speculators_config({}), "lacks hidden_size"),
    "no activation": (speculators_config(layers(hidden_act="swoosh")), "activation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_configurations_are_refused_by_name(tmp_path: Path, name: str) -> None:
    fields, said = REFUSED[name]
    with pytest.raises(ModelFormatError, match=said):
        loaded(write(tmp_path, fields, random_head()))


def _without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def _with(**changed: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name.replace("__", "."): tensor for name, tensor in changed.items()})


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "missing": (_without("fc.weight"), r"lacks fc\.weight"),
    "unknown": (_with(extra=torch.zeros(2)), "this configuration has no extra"),
    "mis-shaped": (_with(fc__weight=torch.zeros(WIDTH, WIDTH)), r"fc\.weight has the shape \[24, 24\]"),
    "a switch unsaid": (
        _with(input_norm__weight=torch.ones(3 * WIDTH)),
        r"this configuration has no input_norm\.weight",
    ),
    "whole numbers": (
        _with(fc__weight=torch.zeros(WIDTH, 3 * WIDTH, dtype=torch.int8)),
        r"fc\.weight has the unsupported type torch\.int8",
    ),
    "tokens outside": (_with(d2t=torch.full((DRAFTED,), 50)), "outside of the target's 61"),
    "a token twice": (_with(d2t=-torch.arange(DRAFTED)), "names a token twice"),
    "tables that differ": (_with(d2t=torch.zeros(DRAFTED, dtype=torch.int64)), "different tokens"),
    "numbers for tokens": (_with(d2t=torch.zeros(DRAFTED)), r"d2t has the unsupported type torch\.float32"),
    "no tables": (_without("d2t", "t2d"), "lacks d2t, t2d"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_wrong_tensors_are_named(tmp_path: Path, name: str) -> None:
    change, said = DAMAGED[name]
    tensors = random_head()
    change(tensors)
    with pytest.raises(ModelFormatError, match=said):
        loaded(write(tmp_path, speculators_config(layers()), tensors))


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, flat_config(layers()), flat_names(random_head()))
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        loaded(path)


def test_a_head_in_a_models_place_is_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "head", speculators_config(layers()), random_head())
    with pytest.raises(ParameterError, match=r"^model=.* is not allowed: a model; this is a trained head"):
        LLM(source)


def test_heads_are_told_from_models(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **layers()}))
    assert not is_head(model)
    assert not is_head(tmp_path / "nothing")
    assert is_head(write(tmp_path / "one", speculators_config(layers()), random_head()))
    assert is_head(write(tmp_path / "two", flat_config(layers()), flat_names(random_head())))
