"""Drafters and length policies by name, ours and those of other packages, or as objects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.flags import from_flags
from paceline.cli.options import EngineFlags
from paceline.config import EngineConfig, SamplingParams, engine_config
from paceline.config.registry import DRAFTERS, LENGTHS
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.row_keeper import PerRow, RowKeeper, RowKeepers
from paceline.drafters import Drafter, HybridDrafter, ModelDrafter, NgramDrafter, NoDrafter, Wrapper
from paceline.engine.engine import Request
from paceline.engine.memory import plan_memory
from paceline.errors import ParameterError
from paceline.lengths import FixedLength
from toy import ToyModel, make_engine

SAMPLE = Path(__file__).parents[1] / "sample_package"


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that brings a drafter and a length policy is installed, but not imported."""
    monkeypatch.syspath_prepend(SAMPLE)
    monkeypatch.delitem(sys.modules, "paceline_sample", raising=False)


def test_ours_are_what_their_names_say() -> None:
    assert {name: DRAFTERS.get(name).name for name in DRAFTERS.own} == {name: name for name in DRAFTERS.own}
    assert {name: LENGTHS.get(name).name for name in LENGTHS.own} == {name: name for name in LENGTHS.own}


@pytest.mark.parametrize(
    ("kind", "needs_draft_model", "copies", "on_device"),
    [(ModelDrafter, True, False, True), (NgramDrafter, False, True, False), (HybridDrafter, True, True, False)],
)
def test_a_drafter_says_what_it_needs(
    kind: type[Drafter], needs_draft_model: bool, copies: bool, on_device: bool
) -> None:
    assert (kind.needs_draft_model, kind.copies, kind.on_device) == (needs_draft_model, copies, on_device)
    config = EngineConfig(drafter=kind.name)
    assert (config.asks_draft_model, config.looks_up) == (needs_draft_model, copies)


def test_our_own_names_are_taken_without_a_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the metadata takes milliseconds at each start of an engine."""
    monkeypatch.setattr("paceline.config.registry.entry_points", lambda **_: pytest.fail("the metadata was read"))
    EngineConfig(drafter="ngram", num_speculative_tokens="bass")
    EngineConfig(drafter=NgramDrafter, num_speculative_tokens=FixedLength(2))


@pytest.mark.usefixtures("sample")
def test_errors_list_what_other_packages_bring_and_import_nothing() -> None:
    with pytest.raises(ParameterError, match=r"drafter='eagle' .*'auto', 'model', 'ngram', 'hybrid', .*'echo'"):
        EngineConfig(drafter="eagle")
    with pytest.raises(ParameterError, match=r"num_speculative_tokens='fast' .*'bass', 'profiled', 'careful'"):
        EngineConfig(num_speculative_tokens="fast")
    EngineConfig(drafter="echo")
    assert "paceline_sample" not in sys.modules


def test_what_no_package_brings_is_refused() -> None:
    for given in ("echo", 3, object(), "Auto"):
        with pytest.raises(ParameterError, match="drafter="):
            EngineConfig(drafter=given)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="a whole number from 0 to"):
        EngineConfig(num_speculative_tokens=NgramDrafter)  # type: ignore[arg-type]


@pytest.mark.usefixtures("sample")
def test_a_name_of_another_package_is_as_good_as_ours() -> None:
    engine = make_engine(ToyModel(), drafter="echo", num_speculative_tokens="careful")
    assert "drafter echo, length careful, " in engine.describe()
    assert (engine.parts.drafter.name, engine.parts.policy.name) == ("echo", "careful")
    config = engine.config
    assert (config.asks_draft_model, config.looks_up, config.reads_profile) == (False, False, False)
    assert engine.identity().drafter == "echo"
    five = plan_memory(ToyModel(), None, replace(engine.config, num_speculative_tokens=5), 4, 64)
    assert plan_memory(ToyModel(), None, engine.config, 4, 64) == five


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"drafter": "echo", "draft_quantization": "int8"}, "draft_quantization"),
        ({"drafter": "echo", "num_speculative_tokens": "careful", "profile": "p.json"}, "profile"),
    ],
)
def test_options_that_it_has_no_use_for_are_refused(options: Any, name: str) -> None:
    with pytest.raises(ParameterError, match=f"^{name}=.*it needs"):
        engine_config(options)


@pytest.mark.usefixtures("sample")
def test_the_command_line_takes_names_of_other_packages() -> None:
    from_flags(EngineFlags, {"drafter": "echo", "num_speculative_tokens": "careful"}).check()
    with pytest.raises(ParameterError, match="drafter='ecco' is not allowed"):
        from_flags(EngineFlags, {"drafter": "ecco"})


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(("name", "why"), [("broken", "ModuleNotFoundError"), ("wrong", "something else")])
def test_a_package_that_does_not_keep_its_word_is_named(name: str, why: str) -> None:
    with pytest.raises(ParameterError, match=f"drafter='{name}' .*{why}"):
        make_engine(ToyModel(), drafter=name)


@pytest.mark.usefixtures("sample")
def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[paceline.drafters]\necho = other:Echo\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ParameterError, match=r"one package.*other:Echo.*paceline_sample:Echo"):
        make_engine(ToyModel(), drafter="echo")


@pytest.mark.usefixtures("sample")
def test_an_object_is_a_pattern_of_which_each_engine_plays_a_copy() -> None:
    sample = importlib.import_module("paceline_sample")
    drafter, policy = sample.Echo(period=3), sample.Careful()
    first = make_engine(ToyModel(), drafter=drafter, num_speculative_tokens=policy)
    second = make_engine(ToyModel(), drafter=sample.Echo, num_speculative_tokens=sample.Careful)
    assert (first.parts.drafter.period, second.parts.drafter.period) == (3, 1)  # type: ignore[attr-defined]
    for engine in (first, second):
        assert type(engine.parts.drafter) is sample.Echo
        assert type(engine.parts.policy) is sample.Careful
    assert first.parts.drafter is not drafter
    assert first.parts.policy is not policy
    assert (
        make_engine(ToyModel(), drafter="ngram", num_speculative_tokens=FixedLength(3)).parts.policy.name == "fixed(3)"
    )


class Witness(RowKeepers, Drafter):
    """Knows whose every slot is, and looks whether that stays so; some of its draft tokens are kept."""

    name = "witness"

    def __init__(self) -> None:
        self.owners: PerRow[int] = PerRow()
        self.most = 0

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return (self.owners,)

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        owners = batch.sampling.seed[batch.slots].tolist()
        assert [self.owners.setdefault(slot, owner) for slot, owner in zip(batch.slots, owners, strict=True)] == owners
        assert set(self.owners) == set(batch.slots), "sequences that ended are forgotten"
        self.most = max(self.most, batch.rows)
        return Draft(batch.pending().expand(-1, plan.k), torch.full_like(batch.live_length, plan.k))


WRAPS: dict[str, Callable[[Drafter], Drafter]] = {
    "alone": lambda drafter: drafter,
    "wrapped": Wrapper,
    "hybrid": lambda drafter: HybridDrafter(drafter, NoDrafter()),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_drafter_is_told_which_sequences_begin_and_end(wrap: Callable[[Drafter], Drafter]) -> None:
    engine = make_engine(ToyModel(), drafter="ngram", max_batch_size=3, prefill_chunk=5)
    witness = Witness()
    engine.parts.drafter = wrap(witness)
    engine.use_policy(FixedLength(2))
    params = [SamplingParams(seed=i, max_tokens=3 + 7 * (i % 4), n=1 + i % 3) for i in range(12)]
    outputs = [engine.add(Request([1 + i % 5] * (1 + 6 * (i % 4)), each)) for i, each in enumerate(params)]
    while engine.busy:
        engine.step()
        if len(outputs[7].outputs[0].token_ids) == 2:
            engine.abort(outputs[7].request_id)
    assert witness.most == 3
    assert not witness.owners
    engine.add(Request([1, 2, 3], SamplingParams(seed=1)))
    engine.step()
    engine.clear()
    assert not witness.owners


@pytest.mark.usefixtures("sample")
def test_a_configuration_with_objects_is_json_with_their_names() -> None:
    sample = importlib.import_module("paceline_sample")
    config = EngineConfig(drafter=sample.Echo(), num_speculative_tokens=sample.Careful())
    assert config.as_json() == EngineConfig(drafter="echo", num_speculative_tokens="careful").as_json()
    assert config.as_json()["drafter"] == "echo"
    assert (config.length_name, replace(config, num_speculative_tokens=4).length_name) == ("careful", "k=4")


FILE = """
import dataclasses
from paceline.drafters import NgramDrafter
from paceline.lengths import LengthPolicy

@dataclasses.dataclass(frozen=True)
class Sized:
    size: int = 3

class Mine(NgramDrafter):
    name = "mine"

class Two(LengthPolicy):
    name = "two"
    def choose(self, batch):
        raise NotImplementedError

nothing = Sized()
"""


def test_a_class_is_named_by_its_file_or_its_module(tmp_path: Path, sample: None) -> None:
    path = tmp_path / "own drafter.py"
    path.write_text(FILE)
    config = EngineConfig(drafter=f"{path}:Mine", num_speculative_tokens=f"{path}:Two")
    assert (config.drafter_kind.name, LENGTHS.get(config.num_speculative_tokens).name) == ("mine", "two")
    assert config.drafter_kind is DRAFTERS.get(f"{path}:Mine"), "one class, however often it is named"
    module = DRAFTERS.get("paceline_sample:Echo")
    assert isinstance(module, type)
    refused = {
        f"{path}:nothing": "what it names is something else",
        f"{path}:Absent": "AttributeError",
        f"{path}x.py:Mine": "FileNotFoundError",
        "paceline_nowhere:Mine": "ModuleNotFoundError",
    }
    for place, said in refused.items():
        with pytest.raises(ParameterError, match=said):
            EngineConfig(drafter=place).drafter_kind  # noqa: B018
    with pytest.raises(ParameterError, match=r"path\.py:Class"):
        EngineConfig(drafter="own drafter")
