"""Prefixes in files: written when they give way in memory, read back for a prompt that begins with one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait

from torch import Tensor

from paceline.engine.prefix_files import FileInReading, PrefixFiles
from paceline.engine.prefixes import WORTH_WAITING, CachedPrefix
from paceline.engine.sequences import Sequence
from paceline.engine.slot_table import SlotTable


class StoredPrefixes:
    """Moves prefixes between slots and files."""

    def __init__(self, slots: SlotTable, files: PrefixFiles) -> None:
        self._slots, self.files = slots, files

    def look_for(self, sequence: Sequence) -> None:
        """Let a sequence wait for a file with more of its prompt than slots hold, if there is one."""
        if sequence.reading is not None:
            return
        file, length = self.files.find(sequence.prefill_text, sequence.scope)
        known = max(sequence.num_computed[0], sequence.prefix_stop)
        if file is not None and length - known >= sequence.scope.worth_waiting:
            sequence.prefix_reader, sequence.prefix_stop = None, 0
            sequence.prefix_file = self.files.begin_read(file, length)

    def restore(self, sequence: Sequence, found: FileInReading) -> None:
        """Fill a sequence's slot from the file that it waited for, unless that was damaged."""
        tensors, counts, decoders = found.tensors.result(), self._slots.free.counts, self._slots.decoders
        sequence.prefix_file = None
        if tensors is None:
            return
        parts = [_part(tensors, index) for index in range(len(decoders))]
        computed = [len(found.file.tokens), *map(_computed, parts[1:])]
        if not all(
            each.is_row(part, tokens, computed[0]) for each, part, tokens in zip(decoders, parts, computed, strict=True)
        ):
            self.files.refuse(found.file, "its tensors have other shapes")
            return
        for decoder, part, tokens in zip(decoders, parts, computed, strict=True):
            decoder.restore_row(sequence.slot, part, min(tokens, found.length), found.length)
        sequence.note_cached(found.length - sequence.num_computed[0])
        counts.read, counts.tokens = counts.read + 1, counts.tokens + found.length - sequence.num_computed[0]
        sequence.num_computed = self._slots.cached(sequence.slot, found.length)

    def wait(self, seconds: float) -> None:
        """Wait until a file is read that a sequence waits for, but no longer than ``seconds``."""
        files = [each.prefix_file.tensors for each in self._slots.used.values() if each.prefix_file is not None]
        wait(files, seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Write all prefixes that later requests may reuse, the most recently used first, and close the files."""
        for age, slot in enumerate(reversed(self._slots.free.by_use)):
            prefix = self._slots.free.prefixes[slot]
            if _is_worth_a_file(prefix):
                self.files.write(prefix.tokens, prefix.scope, self._tensors(slot, prefix), age)
        self.files.close()

    def begin_write(self, slot: int, prefix: CachedPrefix) -> None:
        """Write a prefix that gives way, if it is worth a file."""
        if _is_worth_a_file(prefix):
            self.files.begin_write(prefix.tokens, prefix.scope, lambda: self._tensors(slot, prefix))

    def _tensors(self, slot: int, prefix: CachedPrefix) -> dict[str, Tensor]:
        """Return a copy of what all caches hold of a prefix."""
        computed = self._slots.cached(slot, len(prefix.tokens))
        rows = [
            decoder.row(slot, tokens, computed[0])
            for decoder, tokens in zip(self._slots.decoders, computed, strict=True)
        ]
        return {f"{index}.{name}": tensor for index, row in enumerate(rows) for name, tensor in row.items()}


def _is_worth_a_file(prefix: CachedPrefix) -> bool:
    """Whether a prefix is long enough. Adapters are not in the fingerprint of files."""
    return prefix.is_kept and not prefix.has_adapter and len(prefix.tokens) >= WORTH_WAITING


def _part(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return the tensors of one decoder from those of a file."""
    front = f"{index}."
    return {name.removeprefix(front): tensor for name, tensor in tensors.items() if name.startswith(front)}


def _computed(part: Mapping[str, Tensor]) -> int:
    """Return for how many tokens a decoder's part has keys, whatever else is wrong with it."""
    table = part.get("table0")
    return 0 if table is None or table.dim() != 4 else table.shape[2]
