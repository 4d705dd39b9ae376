"""Names of weights in checkpoint files, translated into paceline's.

Paceline's names: ``embed``, ``positions``, ``norm``, ``head``, ``project_in``, ``project_out``, and per layer
``layers.N.`` followed by ``q``, ``k``, ``v`` (or ``qkv``), ``o``, ``gate``, ``up`` (or ``gate_up``), ``down`` and the
norms ``attn_norm``, ``mlp_norm`` (before), ``attn_out_norm``, ``mlp_out_norm`` (after), ``q_norm``, ``k_norm``.
Latent attention has ``q_a``, ``q_a_norm`` and ``q_b`` (or ``q``), ``kv_a``, ``kv_a_norm``, ``kv_b`` and ``o``.
Inputs by token (``TokenInputsSpec``) are ``input_table``, ``input_project``, ``input_norm``, and per layer
``input_gate``, ``input_out``, ``input_out_norm``; a number that scales a layer's output is ``scale.weight``. A
mixture of experts has ``router``, and for all experts together ``experts_gate``, ``experts_up`` (or
``experts_gate_up``) and ``experts_down``, or for each one ``expert.E.gate`` and so on. Factors of the experts' outputs
are ``experts_scale.weight``; norms of a mixture's own are named in ``weights.EXPERTS_NORMS``; ``latent_in`` and
``latent_out`` map to the width of the experts and back. What a draft head reads (``DecoderSpec.mtp``) goes through
``mtp.fc``, ``mtp.embedding_norm`` and ``mtp.hidden_norm``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

# gguf_config itself reads those of GGUF files
_FREQUENCIES = re.compile(r".*rotary_emb\.inv_freq|rope_freqs\.weight|rope_factors_(long|short)\.weight")


def ignoring(pattern: str) -> re.Pattern[str]:
    """Return the names of tensors that are no weights of a decoder, and of those that match the pattern as a whole."""
    return re.compile(f"{_FREQUENCIES.pattern}|{pattern}")


OWN_HEAD = ignoring(r"mtp\..*")
"""With the tensors of a draft head in the model's own files."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class WeightNames:
    """Names of the weights in one kind of checkpoint. ``{}`` stands for the layer index, then for an expert's.

    parts: the checkpoint's name without ".weight" or ".bias" -> paceline's name. A checkpoint's name that has neither
        is translated whole, into a name that has one.
    prefixes: prefixes of the checkpoint's names; the first that matches is removed. "{layers}" in one stands for the
        number of the model's layers (``behind``).
    ignored: names of tensors that are no weights of the decoder.
    transposed: last parts of paceline's names of matrices that are stored [in, out] (gpt2's Conv1D).
    interleaved: last parts of paceline's names of matrices whose rows of the gate and of up alternate.
    by_head: last parts of paceline's names of matrices in which each head's query, key and value follow each other.
    plus_one: last parts of paceline's names of norms whose stored weight is one less than the factor.
    """

    parts: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    ignored: re.Pattern[str] = _FREQUENCIES
    transposed: frozenset[str] = frozenset()
    plus_one: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()
    by_head: frozenset[str] = frozenset()

    def behind(self, layers: int) -> WeightNames:
        """Return the names of a model with so many layers."""
        return replace(self, prefixes=tuple(prefix.replace("{layers}", str(layers)) for prefix in self.prefixes))

    def ignoring_layer(self, number: int) -> WeightNames:
        """Return the names without those of one more layer."""
        return replace(self, ignored=re.compile(rf"{self.ignored.pattern}|(.*\.)?layers\.{number}\..*"))

    def ours(self, name: str) -> str | None:
        """Translate a checkpoint's name into paceline's, such as "layers.3.q.weight"; None if it is unknown."""
        name = next((name.removeprefix(prefix) for prefix in self.prefixes if name.startswith(prefix)), name)
        numbers = _NUMBER.findall(name)
        name = _NUMBER.sub("{}", name)
        if name in self.parts:
            return self.parts[name].format(*numbers)
        stem, _, suffix = name.rpartition(".")
        part = self.parts.get(stem)
        return None if part is None else f"{part.format(*numbers)}.{suffix}"
