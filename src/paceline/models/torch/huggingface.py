"""Other causal models of transformers, run by their own code but with paceline's cache and attention.

transformers passes queries, keys and values to an attention function that is chosen by name. The function "paceline"
passes them to the ``attend`` of the forward pass, which travels through transformers' keyword arguments, so models
share no state. Models that this does not cover are refused: on construction, the logits are compared with those of the
unmodified model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from paceline.core.cache import KVCache, KVHeads
from paceline.core.slots import Slots
from paceline.errors import ModelFormatError
from paceline.kernels.attention.base import PLAIN, Attend, AttentionTerms
from paceline.kernels.attention.cached import CachedAttend
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.models.base import HiddenStates, check_taps
from paceline.models.families.rotary import longest_sequence
from paceline.models.files.boundary import name_of
from paceline.models.torch.pretrained import (
    CHECK_LENGTH,
    TOLERANCE,
    attempt,
    bytes_of,
    check_causal,
    check_tokens,
    decoder_and_head,
    distance,
    logits_of,
    own_logits,
    refuse_unless,
    shared_copy,
)

ATTENTION = "paceline"  # there is no mask function of this name, so transformers builds no masks
# Chunks are as long as the longest sequence (``longest_sequence``), and attention within one is full.
SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paceline_attend: Attend | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function called by transformers: query [B, H, L, D], key, value [B, G, L, D] -> [B, L, H, D]."""
    if paceline_attend is None:
        raise ModelFormatError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    if attention_mask is not None:
        raise ModelFormatError(f"{type(module).__name__} makes its own attention mask")
    if others.get("position_bias") is not None:
        raise ModelFormatError(f"{type(module).__name__} needs position_bias in its attention")
    sinks = others.get("sinks") if others.get("s_aux") is None else others["s_aux"]
    own_window = getattr(module, "sliding_window", None)  # of a layer that passes none; who passes None has no window
    window = others.get("sliding_window", own_window)
    terms = AttentionTerms(scaling, window, others.get("softcap"), None if sinks is None else sinks.flatten())
    layer: Any = module.layer_idx
    out = paceline_attend(int(layer), query, key, value, terms)
    return out.transpose(1, 2).contiguous(), None  # some models rely on contiguous output


AttentionInterface.register(ATTENTION, _attention)


class _Probe:
    """An ``attend`` that records the heads and windows of its calls and returns zeros."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.heads: dict[int, KVHeads] = {}
        self.windows: dict[int, int | None] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:
        self.layers.append(layer)
        self.windows[layer] = terms.window
        width = v.shape[-1]
        self.heads[layer] = KVHeads(k.shape[1], k.shape[-1], None if width == k.shape[-1] else width)
        return q.new_zeros(*q.shape[:-1], v.shape[-1])


class HuggingFaceModel:
    """A transformers model as a ``Model``. It shares the weights of ``model``, which is not changed.

    Raises ModelFormatError if its attention cannot use paceline's cache, or if its logits differ from the model's own.
    """

    # it may synchronise with the device, so it is not captured in a CUDA graph
    device_obstacle = "a model runs through transformers' own code"

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.name = name_of(model)
        self.vocab_size = int(config.vocab_size)
        self.dtype, self.device = model.dtype, model.device
        check_layers(model, config)
        self.max_positions = longest_sequence(config)
        self._decoder, self._head = _wired(model)
        probe = self._probe(model)
        self.layers = len(probe.layers)
        self.kv_layers = [probe.heads[layer] for layer in range(self.layers)]
        self.kv_heads, self.head_dim, *_ = self.kv_layers[0]
        self._check_windows(config, probe)
        self._check_logits(model)

    @torch.no_grad()
    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        """Run tokens, positions [B, L] int64 -> hidden [B, L, width], features [B, L, taps, width].

        The features are transformers' hidden_states. Raises ModelFormatError if the model does not return them.
        """
        options = {"output_hidden_states": True} if taps else {}
        out = self._decoder(
            input_ids=tokens,
            position_ids=positions.clamp(max=self.max_positions - 1),  # only padding lies beyond the last position
            use_cache=False,
            paceline_attend=attend,
            **options,
        )
        return HiddenStates(out.last_hidden_state, self._tapped(out, taps) if taps else None)

    def _tapped(self, out: Any, taps: Sequence[int]) -> Tensor:
        """Return the features [B, L, taps, width].

        hidden_states[i] is the input of layer i. There is one more entry, the normalised output of the last layer.
        """
        check_taps(taps, self.layers)
        states = getattr(out, "hidden_states", None) or ()
        refuse_unless(
            self._decoder,
            len(states) == self.layers + 1,
            f"it returns {len(states)} hidden states of {self.layers} layers",
        )
        return torch.stack([states[tap] for tap in taps], 2)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., width].

        They are scaled and soft-capped as the model does it.
        """
        return logits_of(self._head, hidden)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights. Tied weights are counted once."""
        return bytes_of(self._decoder, self._head)

    @torch.no_grad()
    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token; see ``Counted``.

        torch counts them in a forward pass of one token, so inactive experts do not count.
        """
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with FlopCounterMode(display=False) as counter:
            self.logits(self.hidden_states(token, token, _Probe()).hidden)
        return int(counter.get_total_flops()) // 2

    # Checks on construction

    def _probe(self, model: PreTrainedModel) -> _Probe:
        """Run one pass that records which layers call the attention, and their shapes."""
        probe, tokens = _Probe(), check_tokens(model)
        positions = torch.arange(CHECK_LENGTH, device=self.device).expand_as(tokens)
        attempt(self.name, lambda: self.hidden_states(tokens, positions, probe))
        refuse_unless(
            self._decoder,
            bool(probe.layers) and sorted(probe.layers) == list(range(len(probe.layers))),
            f"its layers call the attention as {probe.layers}, not once each",
        )
        return probe

    def _check_windows(self, config: PretrainedConfig, probe: _Probe) -> None:
        """Compare each layer's window with the configuration. Windows are too long for the check of the logits.

        A window as long as the longest sequence is none.
        """
        kinds = getattr(config, "layer_types", None) or []
        window = getattr(config, "sliding_window", None)
        wanted = [window if kind == "sliding_attention" else None for kind in kinds] or [window] * self.layers
        found = [probe.windows[layer] for layer in range(self.layers)]
        wanted, found = (
            [None if size is not None and size >= self.max_positions else size for size in sizes]
            for sizes in (wanted, found)
        )
        refuse_unless(
            self._decoder, found == wanted, f"its layers ask for the windows {found}, its configuration for {wanted}"
        )

    def _check_logits(self, model: PreTrainedModel) -> None:
        """Compare the logits of a prefill, then of rows at different positions, with those of the unmodified model.

        In low precision a mixture's router may choose another expert where two are nearly equal, so a difference is
        looked for again in float32.
        """
        tokens, cache = check_tokens(model), self._new_cache()
        expected = own_logits(model, tokens)
        check_causal(model, tokens, expected)
        every = torch.arange(CHECK_LENGTH, device=self.device).expand_as(tokens)
        ragged = torch.stack((every[0, -4:], every[0, -7:-3]))
        errors = [
            attempt(self.name, partial(self._error, tokens, at, cache, expected)) for at in (every[:, :-4], ragged)
        ]
        fits = all(error <= TOLERANCE.get(self.dtype, 0.1) for error in errors)  # not if it is not a number
        if not fits and self.dtype != torch.float32:
            HuggingFaceModel(copy.deepcopy(model).float())  # raises ModelFormatError if it differs there, too
            return
        takes = "position_ids" in inspect.signature(getattr(self._decoder, "decoder", self._decoder).forward).parameters
        refuse_unless(
            self._decoder, fits or takes, "it counts positions itself, so rows of different lengths cannot share a pass"
        )
        refuse_unless(self._decoder, fits, f"its logits differ from transformers' own by {max(errors):.2g}")

    def _new_cache(self) -> KVCache:
        return KVCache(self.kv_layers, 2, CHECK_LENGTH, self.dtype, self.device)

    def _error(self, tokens: Tensor, positions: Tensor, cache: KVCache, expected: Tensor) -> float:
        """Return the distance of the logits at some positions from the expected ones, relative to their norm."""
        backend, rows = ReferenceAttention(), Slots.listed(range(len(positions)), self.device)
        attend = CachedAttend(cache, backend, backend.plan(positions, CHECK_LENGTH), rows)
        found = self.logits(self.hidden_states(tokens.gather(1, positions), positions, attend).hidden)
        wanted = expected.gather(1, positions[:, :, None].expand(-1, -1, expected.shape[-1]))
        return distance(found, wanted)


def check_layers(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Raise ModelFormatError for a model with other layers than attention."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    others = sorted({kind for kind in kinds if kind not in SUPPORTED_LAYERS})
    refuse_unless(model, not others, f"its layers are of the kind {' or '.join(others)}")


def _wired(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return two copies that share the weights: the decoder with paceline's attention, and the head alone."""
    wired = shared_copy(model)
    wired.set_attn_implementation(ATTENTION)
    refuse_unless(
        model,
        wired.config.get_text_config()._attn_implementation == ATTENTION,
        "its attention does not go through transformers' attention interface",
    )
    return decoder_and_head(wired)
