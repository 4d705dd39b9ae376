"""Other causal models of transformers, run by their own code but with paceline's cache and attention.

transformers passes queries, keys and values to an attention function that is chosen by name. The function "paceline"
passes them to the ``attend`` of the forward pass, which travels through transformers' keyword arguments, so models
share no state. Models that this does not cover are refused: on construction, the logits are compared with those of the
unmodified model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from paceline.core.cache import KVCache, KVHeads
from paceline.core.slots import Slots
from paceline.errors import ModelFormatError, PacelineError
from paceline.kernels.attention.base import PLAIN, Attend, AttentionTerms
from paceline.kernels.attention.cached import CachedAttend
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.models.base import HiddenStates, check_taps
from paceline.models.families.rotary import longest_sequence
from paceline.models.files.boundary import brief, name_of, reading

ATTENTION = "paceline"  # there is no mask function of this name, so transformers builds no masks
CHECK_LENGTH = 12  # tokens per row of the checks
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # relative to the norm of the logits
SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
STATEFUL_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
# Largest relative change of earlier logits by later tokens in float32. Rounding is below it; BERTs have 4e-4 and more.
LEAK = 1e-5


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


@dataclass
class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output in which every other attribute is None, whatever the head reads."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Echo(nn.Module):
    """Replaces the decoder and returns its input, so that the model computes logits of given hidden states."""

    @property
    def decoder(self) -> _Echo:
        """The decoder within a wrapper, as models have it whose classes are also those of encoders."""
        return self

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


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
        check_layers(self.name, config)
        self._refuse_unless(hasattr(config, "max_position_embeddings"), "its configuration gives no longest sequence")
        self.max_positions = longest_sequence(config)
        self._decoder, self._head = self._wire(model)
        probe = self._probe()
        self.layers = len(probe.layers)
        self.kv_layers = [probe.heads[layer] for layer in range(self.layers)]
        self.kv_heads, self.head_dim, *_ = self.kv_layers[0]
        self._check_windows(config, probe)
        self._check_logits(model)

    @classmethod
    def from_directory(cls, path: Path, *, dtype: torch.dtype, device: torch.device) -> HuggingFaceModel:
        """Load the model of a directory with safetensors files.

        Raises ModelFormatError if a file is damaged, a weight is missing or unexpected, or the model cannot be run.
        """
        if (path / "adapter_config.json").exists():
            raise ModelFormatError(
                f"{path}: adapter_config.json lies beside the model, and transformers would apply it. Move it away "
                "if it is merged; else give its own directory in adapters"
            )
        with reading(path, "cannot be loaded by transformers"):
            config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            check_layers(str(path), config.get_text_config())
            model, info = _auto_class(config, path).from_pretrained(
                str(path),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        problems = [f"{kind}: {name}" for kind, names in info.items() for name in list(names)[:4]]
        if problems:
            raise ModelFormatError(f"{path}: the weights do not fit the configuration ({brief('; '.join(problems))})")
        return cls(model.to(device))

    def _refuse_unless(self, supported: bool, reason: str) -> None:
        if not supported:
            raise ModelFormatError(f"{self.name} cannot be run: {reason}")

    def _wire(self, model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Return two copies that share the weights: the decoder with paceline's attention, and the head alone."""
        weights = {id(tensor): tensor for tensor in model.parameters()}
        wired = copy.deepcopy(model, dict(weights)).eval()
        wired.set_attn_implementation(ATTENTION)
        self._refuse_unless(
            wired.config.get_text_config()._attn_implementation == ATTENTION,
            "its attention does not go through transformers' attention interface",
        )
        head = copy.copy(wired)
        head._modules = {**wired._modules, wired.base_model_prefix: _Echo()}
        self._refuse_unless(wired.base_model is not wired, "it has no separate decoder")
        multimodal = wired.config.get_text_config() is not wired.config  # only the text model is kept
        return wired.get_decoder() if multimodal else wired.base_model, head

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
        self._refuse_unless(
            len(states) == self.layers + 1, f"it returns {len(states)} hidden states of {self.layers} layers"
        )
        return torch.stack([states[tap] for tap in taps], 2)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., width].

        They are scaled and soft-capped as the model does it.
        """
        logits: Tensor = self._head(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
        return logits.view(*hidden.shape[:-1], -1).float()

    def weight_bytes(self) -> int:
        """Return the bytes of all weights. Tied weights are counted once."""
        parameters = [*self._decoder.parameters(), *self._head.parameters()]
        return sum({tensor.data_ptr(): int(tensor.nbytes) for tensor in parameters}.values())

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

    def _tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (2, CHECK_LENGTH), generator=generator).to(self.device)

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PacelineError:
            raise
        except Exception as error:  # the model's code may raise any exception
            raise ModelFormatError(f"{self.name} cannot be run with paceline's cache: {brief(error)}") from error

    def _probe(self) -> _Probe:
        """Run one pass that records which layers call the attention, and their shapes."""
        probe, tokens = _Probe(), self._tokens()
        positions = torch.arange(CHECK_LENGTH, device=self.device).expand_as(tokens)
        self._attempt(lambda: self.hidden_states(tokens, positions, probe))
        self._refuse_unless(
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
        self._refuse_unless(found == wanted, f"its layers ask for the windows {found}, its configuration for {wanted}")

    def _check_logits(self, model: PreTrainedModel) -> None:
        """Compare the logits of a prefill, then of rows at different positions, with those of the unmodified model.

        In low precision a mixture's router may choose another expert where two are nearly equal, so a difference is
        looked for again in float32.
        """
        tokens, cache = self._tokens(), self._new_cache()
        expected = self._own_logits(model, tokens)
        self._check_causal(model, tokens, expected)
        every = torch.arange(CHECK_LENGTH, device=self.device).expand_as(tokens)
        ragged = torch.stack((every[0, -4:], every[0, -7:-3]))
        errors = [self._attempt(partial(self._error, tokens, at, cache, expected)) for at in (every[:, :-4], ragged)]
        fits = all(error <= TOLERANCE.get(self.dtype, 0.1) for error in errors)  # not if it is not a number
        if not fits and self.dtype != torch.float32:
            HuggingFaceModel(copy.deepcopy(model).float())  # raises ModelFormatError if it differs there, too
            return
        takes = "position_ids" in inspect.signature(getattr(self._decoder, "decoder", self._decoder).forward).parameters
        self._refuse_unless(
            fits or takes, "it counts positions itself, so rows of different lengths cannot share a pass"
        )
        self._refuse_unless(fits, f"its logits differ from transformers' own by {max(errors):.2g}")

    @torch.no_grad()
    def _own_logits(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        logits: Tensor = self._attempt(lambda: model(input_ids=tokens, use_cache=False).logits.float())
        return logits

    def _check_causal(self, model: PreTrainedModel, tokens: Tensor, logits: Tensor) -> None:
        """Check that no token changes the logits before it.

        Rounding in low precision can also change them, so a difference is measured again in float32.
        """
        others, half = tokens.clone(), CHECK_LENGTH // 2
        others[:, half:] = (others[:, half:] + 1 + self.vocab_size // 2) % self.vocab_size
        leak = _distance(self._own_logits(model, others)[:, :half], logits[:, :half])
        if leak > 0 and self.dtype != torch.float32:
            exact = copy.deepcopy(model).float()
            before, after = (self._own_logits(exact, inputs)[:, :half] for inputs in (tokens, others))
            leak = _distance(after, before)
        self._refuse_unless(leak <= LEAK, f"it is not causal: later tokens change its earlier logits by {leak:.2g}")

    def _new_cache(self) -> KVCache:
        return KVCache(self.kv_layers, 2, CHECK_LENGTH, self.dtype, self.device)

    def _error(self, tokens: Tensor, positions: Tensor, cache: KVCache, expected: Tensor) -> float:
        """Return the distance of the logits at some positions from the expected ones, relative to their norm."""
        backend, rows = ReferenceAttention(), Slots.listed(range(len(positions)), self.device)
        attend = CachedAttend(cache, backend, backend.plan(positions, CHECK_LENGTH), rows)
        found = self.logits(self.hidden_states(tokens.gather(1, positions), positions, attend).hidden)
        wanted = expected.gather(1, positions[:, :, None].expand(-1, -1, expected.shape[-1]))
        return _distance(found, wanted)


def check_layers(name: str, config: PretrainedConfig) -> None:
    """Raise ModelFormatError for a model with other layers than attention, before its weights are loaded."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    others = [kind for kind in kinds if kind not in SUPPORTED_LAYERS]
    if STATEFUL_LAYERS & set(others):
        raise ModelFormatError(
            f"{name} cannot be run yet: {len(others)} of its {len(kinds)} layers are of the kind "
            f"{' or '.join(sorted(set(others)))} (model_type {config.model_type!r}). Such recurrent or hybrid models "
            "carry a state from token to token, which cannot be rolled back when draft tokens are rejected"
        )
    if others:
        raise ModelFormatError(f"{name} cannot be run: its layers are of the kinds {', '.join(sorted(set(kinds)))}")


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``wanted``."""
    return float((found - wanted).norm() / wanted.norm())


def _auto_class(config: PretrainedConfig, path: Path) -> Any:
    """Return transformers' auto class for generative text models of this type. Raises ModelFormatError."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise ModelFormatError(f"{path}: models of type {config.model_type!r} do not generate text token by token")
