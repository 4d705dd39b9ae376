"""Describes what an engine runs: one line for people, and the identity under which measurements are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.config import EngineConfig
from paceline.core.cpus import Node, ranges
from paceline.core.hardware import machine_name
from paceline.drafters.heads.native import NativeHead
from paceline.engine.assembly import Models
from paceline.engine.memory import GIB, FittedRows, row_bytes
from paceline.engine.rounds.choice import why_no_graph, why_no_kernels
from paceline.engine.rounds.device_round import DeviceRound
from paceline.engine.rounds.kernels import runs_native_rounds
from paceline.engine.rounds.loop import RoundLoop
from paceline.engine.rounds.round import Speculation
from paceline.engine.threads import nodes_of_rank
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.lengths.profile import Identity
from paceline.models.base import AnyModel, FlatModel
from paceline.models.files.fingerprint import model_hash
from paceline.models.native.model import NativeModel


@dataclass(frozen=True)
class EngineDescription:
    """Describes what an engine runs.

    device_round: the round as a program of the device; None if all rounds run on the host.
    threads: CPU threads of the kernels. nodes: NUMA nodes between which they are divided.
    fitted: rows, tokens of the longest sequence, and memory of the KV caches.
    """

    models: Models
    config: EngineConfig
    parts: Speculation
    device_round: DeviceRound | None
    threads: int
    nodes: tuple[Node, ...]
    fitted: FittedRows

    def identity(self) -> Identity:
        """Return the key of profiles and cost tables: they hold only for an engine with an equal identity."""
        target, draft = self.models.target, self.models.draft if self.config.asks_draft_model else None
        return Identity(
            machine=machine_name(target.device),
            device=target.device.type,
            threads=self.threads,
            target=model_hash(target),
            drafter=_drafter_identity(self.config, draft) + self._describe_width() + self._describe_vocabulary(),
            precision=_precision(target) if draft is None else f"{_precision(target)}, draft {_precision(draft)}",
            attention=self._attention_identity(target) + self._describe_caches(),
            acceptance=self.config.acceptance,
        )

    def _attention_identity(self, target: AnyModel) -> str:
        """Name the attention backend and where rounds run: a round's time depends on both."""
        attention = "native" if isinstance(target, FlatModel) else self.parts.target.backend.name
        return attention if self.device_round is None else f"{attention}, rounds by the device"

    def describe(self, rounds: RoundLoop, preemptions: str, prefixes: str) -> str:
        """Return one line that says what runs, and why not something else.

        rounds: those that have run so far. preemptions: how many. prefixes: what became of cached ones.
        """
        config, drafter = self.config, self.parts.drafter
        speculation = "no speculation"
        draft_model = self.models.draft if drafter.decoders else None
        if name := drafter.describe(None if draft_model is None else _describe_model(draft_model)):
            length = self.parts.policy.describe() + self._describe_width() + self._describe_vocabulary()
            speculation = f"drafter {name}, length {length}, acceptance {config.acceptance}"
            if config.synthetic_acceptance is not None:
                speculation += " (a benchmark: draft tokens are accepted at random, so the text is meaningless)"
        return (
            f"target {_describe_model(self.models.target)}{self._describe_kernels()}, "
            f"{self.threads} threads{self._describe_nodes()}; "
            f"{'embeddings only, without an output head; ' if self.models.embeds_only else ''}"
            f"{speculation}; "
            f"attention {self._describe_attention()}{self._describe_caches()}; {self._describe_rounds(rounds)}"
            f"{self.fitted.rows} rows of {self.fitted.positions} tokens{self._describe_room()}{preemptions}"
            f"{self._describe_prefixes(prefixes)}"
        )

    def _describe_kernels(self) -> str:
        """Say why a faster instruction set does not run; empty if there is none, or no target on the CPU kernels."""
        target = self.models.target
        obstacle = native.faster_obstacle(target.kernels) if isinstance(target, NativeModel) else ""
        return f" ({obstacle})" if obstacle else ""

    def _describe_nodes(self) -> str:
        """Name the NUMA nodes of the threads, and say whether the weights lie there; empty without nodes."""
        target = self.models.target
        if not self.nodes or not isinstance(target, NativeModel):
            return self._describe_ranks([])
        if target.is_part:
            return self._describe_ranks(
                [nodes_of_rank(self.config, rank) for rank in range(self.config.tensor_parallel)]
            )
        placed = target.packed_decoder.nodes == self.nodes
        where = "divided between them" if placed else "where they were loaded"
        return f" on NUMA nodes {_list_nodes(self.nodes)}, weights {where}"

    def _describe_ranks(self, nodes: Sequence[Sequence[Node]]) -> str:
        """Say what each rank on the CPU kernels has, and on which nodes; empty for one process."""
        target = self.models.target
        if not isinstance(target, NativeModel) or not target.is_part:
            return ""
        where = "; ".join(f"rank {rank} on NUMA nodes {_list_nodes(own)}" for rank, own in enumerate(nodes))
        size = f"{target.weight_bytes() / GIB:.2f} GiB of weights and {target.kv_heads} key heads on rank 0"
        return f" a rank ({size}{'; ' if where else ''}{where})"

    def _describe_width(self) -> str:
        """Name the width of trees; empty for chains."""
        width = self.parts.drafter.width
        return "" if width == 1 else f", width {width}"

    def _describe_vocabulary(self) -> str:
        """Name the size of a short draft vocabulary; empty without one."""
        short = next((each.vocabulary for each in self.parts.drafter.decoders if each.vocabulary is not None), None)
        return "" if short is None else f", draft vocabulary {short.size} of {short.vocabulary}"

    def _describe_room(self) -> str:
        """Name the memory limit of the caches; where rows may have to wait for memory, also how many fit.

        Say why there are fewer rows than by default, or shorter ones.
        """
        room, note = self.fitted.budget, self.fitted.note
        fits = room.max_rows(room.positions)
        capacity = f"they grow: {fits} of that length at once, " if fits < room.rows else ""
        chosen = f"; chosen to fit: {note}" if note else ""
        return f" ({capacity}{room.row_limit / GIB:.2f} GiB{chosen}{self._describe_eight_bits()})"

    def _describe_eight_bits(self) -> str:
        """Say how many rows caches of 8 bits would fit where memory is short; empty if no more or not possible."""
        room = self.fitted.budget
        if self.config.max_model_len is None and not self.fitted.note:
            return ""
        if room.max_rows(room.positions) >= room.rows and not self.fitted.note:
            return ""
        try:
            config = replace(self.config, kv_cache_dtype="int8")
            row = row_bytes(self.models.target, self.models.draft, config, room.positions)
        except ParameterError:
            return ""
        fits = room.limit // row
        return f"; kv_cache_dtype='int8' would fit {fits}" if fits > room.max_rows(room.positions) else ""

    def _describe_prefixes(self, prefixes: str) -> str:
        """Say whether prefixes are reused, and how many slots beside the rows keep some.

        prefixes: what became of them.
        """
        if not self.config.prefix_cache:
            return ", no prefix reuse (prefix_cache=False)"
        room = self.fitted.budget
        beside, memory = room.slots - room.rows, (room.limit - room.row_limit) / GIB
        where = f"in {memory:.2f} GiB" if memory > 0 else "in memory that rows do not need"
        slots = f", up to {beside} kept beside the rows {where}" if beside else ""
        return f", prefixes reused{slots}{prefixes}"

    def _describe_attention(self) -> str:
        target = self.models.target
        if isinstance(target, FlatModel):
            return "native (ragged, batch-invariant)"
        if reason := getattr(target, "whole_texts", None):
            return f"transformers' own, over whole texts in every pass (nothing of them is cached: {reason})"
        from paceline.models.load.prepare import why_not_native  # which reads files: engines alone need no gguf

        reason = why_not_native(target, self.config.attention)
        kind = " (deterministic)" if self.config.deterministic else ""
        return self.parts.target.backend.name + kind + (f" (not native: {reason})" if reason else "")

    def _describe_caches(self) -> str:
        """Name the dtype of keys and values; empty if it is the models' own."""
        dtype = self.config.kv_cache_dtype
        return "" if dtype == "auto" else f", keys and values in {dtype}"

    def _describe_rounds(self, rounds: RoundLoop) -> str:
        """Say where rounds run; empty for a CPU target without kernels, whose rounds always run on the host."""
        reason = why_no_graph(self.parts)
        if self.device_round is not None and reason is None:
            return f"{self._describe_device_rounds(self.device_round, rounds)}; "
        if runs_native_rounds(self.models.target):
            return f"{self._describe_kernel_rounds()}; "
        if self.models.target.device.type != "cuda":
            return ""
        has_ranks = self.config.tensor_parallel > 1 and self.config.rounds == "auto"
        reason = reason or ("ranks share the target" if has_ranks else "rounds='host'")
        return f"rounds by the host ({reason}); "

    def _describe_device_rounds(self, device_round: DeviceRound, rounds: RoundLoop) -> str:
        """Say that rounds run on the device, and for what on the host; or that none has run on the device."""
        counts, reasons = rounds.counts, dict.fromkeys(rounds.choice.reasons)
        if counts["host"] > 0 and counts["device"] == 0:
            return f"rounds by the host ({' or '.join(reasons)}), none by the device so far"
        how = "CUDA graphs" if device_round.graphs.captures else "uncaptured"
        by_host = f", by the host for {' or '.join(reasons)}" if reasons else ""
        return f"rounds by the device ({how}, {device_round.program.ops.name} kernels){by_host}"

    def _describe_kernel_rounds(self) -> str:
        if reason := why_no_kernels(self.parts.target, self.parts.accept):
            return f"rounds by the host ({reason})"
        exception = " (step by step: draft tokens with probabilities)" if self.parts.drafter.has_probabilities else ""
        return f"rounds by the kernels{exception}"


def _list_nodes(nodes: Iterable[Node]) -> str:
    return " and ".join(f"{node.number} (CPUs {ranges(node.cpus)})" for node in nodes)


def _drafter_identity(config: EngineConfig, draft: AnyModel | None) -> str:
    name = "None" if config.drafter_kind is None else config.drafter_kind.name
    return name if draft is None else f"{name} {model_hash(draft)}"


def _describe_model(model: AnyModel) -> str:
    where = "" if isinstance(model, FlatModel | NativeHead) else f" on {model.device}"
    return f"{model.name} ({_precision(model)}{where})"


def _precision(model: AnyModel) -> str:
    precision = str(model.dtype).removeprefix("torch.")
    if isinstance(model, FlatModel):
        return f"{model.quantization or precision} on the CPU kernels {model.kernels}"
    return str(getattr(model, "precision", precision))
