"""One decoder for all native families, as their description asks for it.

Tensors have B rows and L new tokens per row; ``torch.layers`` has the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import ModelFormatError
from paceline.kernels.attention.base import Attend
from paceline.kernels.gpu.state import Norm
from paceline.kernels.gpu.steps import steps_for
from paceline.kernels.spec import ReadMatrix, RecurrentMixer
from paceline.models.base import HiddenStates, PassBytes, RowAdapters, check_taps
from paceline.models.description.spec import DecoderSpec, ExpertsSpec, Rotary
from paceline.models.torch.experts import Experts
from paceline.models.torch.layers import (
    DecoderLayer,
    ForwardContext,
    GatedMLP,
    RecurrentLayer,
    TokenInputs,
    WeightSource,
)
from paceline.models.torch.linear import Dense, Linear, LinearFactory, dense
from paceline.models.torch.rotary import RotaryAngles
from paceline.models.torch.short_head import TorchShortHead

_KV = "self_attn.k_proj", "self_attn.v_proj"


def _split(linear: Linear, outputs: Mapping[str, int]) -> dict[str, Tensor]:
    """Split a fused linear layer: weight and bias of each matrix. outputs: name -> number of outputs, in order."""
    assert isinstance(linear, Dense), "the weights are not packed"
    kinds = {"weight": linear.weight, "bias": linear.bias}
    parts = {kind: torch.split(whole, list(outputs.values())) for kind, whole in kinds.items() if whole is not None}
    return {f"{name}.{kind}": part for kind, split in parts.items() for name, part in zip(outputs, split, strict=True)}


def rotaries_of(spec: DecoderSpec) -> list[Rotary]:
    """Return the different rotary positions of a model's layers."""
    return list(dict.fromkeys(attention.rotary for attention in spec.attentions if attention.rotary is not None))


def cap(logits: Tensor, limit: float) -> Tensor:
    """Return limit * tanh(logits / limit): logits between -limit and limit."""
    return (logits / limit).tanh() * limit


_OURS = {"output": "o", "query_up": "q_b"}  # attributes of layers whose names in ``weights.slots`` are others


def _check(spec: DecoderSpec) -> None:
    """Raise ModelFormatError for a model that ``Transformer`` cannot run."""
    if len(set(spec.recurrent)) > 1:
        raise ModelFormatError(f"{spec.family}: recurrent layers of several shapes")


class Transformer:
    """A decoder of a native family; implements ``Model``. spec: its description.

    weights: tensors by the names of ``description.weights.slots``, all of one dtype and on one device.
    linear: factory of the linear layers of attention and MLP. head, experts: of the output head, and of
        experts; None: the same. exact: of routers and of the gates of recurrent layers, which are never rounded.
    readers: read matrices, by name, when their layers are made; ``weights`` then only give their shapes.
    places: the cache's layer that each layer reads; None: as its description says.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        name: str,
        *,
        linear: LinearFactory = dense,
        head: LinearFactory | None = None,
        experts: LinearFactory | None = None,
        exact: LinearFactory = dense,
        readers: Mapping[str, ReadMatrix] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        _check(spec)
        self.spec, self.name = spec, name
        self.vocab_size, self.layers = spec.vocab_size, len(spec.layers)
        first = spec.attentions[0]
        self.kv_heads, self.head_dim = first.kv_heads, first.head_dim
        self.kv_layers = spec.kv_layers
        self.max_positions = spec.max_positions
        self._embedding = weights["embed.weight"]
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self.precision = str(self.dtype).removeprefix("torch.")  # for the start line
        self.steps = steps_for(self.device)
        self.adapters: RowAdapters | None = None  # see ``load.adapters``
        parts = WeightSource(spec, weights, linear, readers, experts, exact)
        self._build(parts, spec.places if places is None else places)
        self._head = parts.linear("embed" if spec.tied else "head", head)
        self._kept = tuple(parts.kept)

    def _build(self, parts: WeightSource, places: Sequence[int]) -> None:
        spec = self.spec
        parts.find("embed.weight")
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=self.dtype).item()  # rounded as transformers does
        self._positions = parts.find("positions.weight")
        self._project_in, self._project_out = parts.find("project_in.weight"), parts.find("project_out.weight")
        rotaries = rotaries_of(spec)
        self._angles = [RotaryAngles(rotary, self.dtype, self.device) for rotary in rotaries]
        numbers = {rotary: number for number, rotary in enumerate(rotaries)}
        self._blocks = [DecoderLayer(spec, parts, index, place, numbers) for index, place in enumerate(places)]
        mixers = self._recurrent_mixers()
        self.state_shape = mixers[0].shape(len(mixers)) if mixers else None
        inputs = spec.token_inputs
        self._token_inputs = None if inputs is None else TokenInputs(inputs, parts, self.dtype)
        self._embed_norm = parts.norm("embed_norm") if spec.embed_norm else None
        self._norm = parts.norm("norm") if spec.final_norm else None

    def _recurrent_mixers(self) -> list[RecurrentMixer]:
        mixers = (mixer for block in self._blocks for mixer in block.mixers)
        return [mixer.mixer for mixer in mixers if isinstance(mixer, RecurrentLayer)]

    def _linears(self) -> Iterator[tuple[object, str]]:
        """Yield the owner and attribute name of each linear layer."""
        yield self, "_head"
        if self._token_inputs is not None:
            yield from ((self._token_inputs, name) for name in self._token_inputs.linears)
        for block in self._blocks:
            for owner in block.owners:
                yield from ((owner, name) for name in owner.linears)

    def layer_linears(self) -> Iterator[tuple[object, str, str]]:
        """Yield owner, attribute and name (of ``weights.slots``, without the suffix) of the layers' linear layers.

        Those of recurrent layers are left out.
        """
        for index, block in enumerate(self._blocks):
            for owner in (owner for owner in block.owners if not isinstance(owner, RecurrentLayer)):
                yield from ((owner, name, f"layers.{index}.{_OURS.get(name, name)}") for name in owner.linears)

    def linears(self) -> list[Linear]:
        """Return the linear layers of attention, MLP and head."""
        return [getattr(owner, name) for owner, name in self._linears()]

    @property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture of experts."""
        return any(isinstance(layer.mlp, ExpertsSpec) for layer in self.spec.layers)

    @property
    def device_obstacle(self) -> str | None:
        """Return why the device cannot run whole rounds of this model; None if it can.

        Without Triton's kernels recurrent layers run token by token, in more launches than a graph has.
        """
        if self.device.type != "cuda":
            return None
        if self.has_experts and not self.steps.groups_rows:
            return "the experts that a router chose are read on the host"
        if self.adapters is not None and not self.steps.groups_rows:
            return "adapters differ from row to row"
        if self._recurrent_mixers() and not self.steps.groups_rows:
            return "recurrent layers run token by token"
        return None

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        """Run tokens, positions [B, L] int64 -> hidden [B, L, embed_width], features [B, L, taps, width].

        The tap ``layers`` is the last layer's output after the final norm. Raises ParameterError for any other tap that
        is no layer.
        """
        check_taps(taps, self.layers + 1)
        x = self._embed(tokens, positions)
        vectors = self._token_inputs
        inputs = None if vectors is None else vectors(tokens.flatten(), x, self.spec.norm.eps)
        tapped: dict[int, Tensor] = {}
        hidden = self.run(x, positions, attend, inputs, taps, tapped)
        return HiddenStates(hidden, self._features(tapped, taps, len(tokens)))

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        token_inputs: Tensor | None = None,
        taps: Sequence[int] = (),
        tapped: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the layers on embeddings x [N, width] at positions [B, L] -> hidden [B, L, embed_width].

        token_inputs: [layers, N, inputs], or None. tapped: gets the hidden states of the layers in ``taps``.
        """
        rows, length = positions.shape
        rotations = [angles(positions) for angles in self._angles]
        forward = ForwardContext(rows, rotations, attend, self.steps, token_inputs)
        tapped = {} if tapped is None else tapped
        norms = [*(block.entry for block in self._blocks), self._norm]
        normed = x if norms[0] is None else norms[0](x)
        for index, (block, following) in enumerate(zip(self._blocks, norms[1:], strict=True)):
            if index in taps:
                tapped[index] = x
            x, normed = block(x, normed, forward, following)
        if self.layers in taps:
            tapped[self.layers] = normed / self.spec.residual_scale  # which ``_features`` takes back
        if self._project_out is not None:
            normed = functional.linear(normed, self._project_out)
        return normed.view(rows, length, -1)

    def _features(self, tapped: Mapping[int, Tensor], taps: Sequence[int], rows: int) -> Tensor | None:
        """Return the published model's hidden states [B, L, taps, width] of the tapped layers [N, width]."""
        if not taps:
            return None
        features = torch.stack([tapped[tap] for tap in taps], 1).view(rows, -1, len(taps), self.spec.width)
        return features if self.spec.residual_scale == 1.0 else features * self.spec.residual_scale

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens, positions [B, L] -> [N, width].

        Padding may lie beyond the last learned position. It uses the last one, since its results are ignored.
        """
        x = functional.embedding(tokens.flatten(), self._embedding)
        if self.spec.embed_scale != 1.0:
            x = x * self._embed_scale
        if self._project_in is not None:
            x = functional.linear(x, self._project_in)
        if self._positions is not None:
            index = positions.flatten().clamp(max=self.max_positions - 1) + self.spec.position_offset
            x = x + functional.embedding(index, self._positions)
        return x if self._embed_norm is None else self._embed_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., embed_width]."""
        return self.scaled(self._head(hidden).float())

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the head's outputs, float32, with the model's factor and cap."""
        if self.spec.logits_scale != 1.0:
            logits *= self.spec.logits_scale
        return logits if self.spec.logits_cap is None else cap(logits, self.spec.logits_cap)

    @property
    def pass_bytes(self) -> PassBytes | None:
        """Return what a forward pass reads, see ``Shortenable``; None for a head that is not ``Dense``."""
        if not isinstance(self._head, Dense):
            return None
        output = self._head.weight.nbytes
        embedding = 0 if self.spec.tied else self._embedding.nbytes  # one row of it is read for each token
        idle = sum(block.mlp.idle_bytes() for block in self._blocks if isinstance(block.mlp, Experts))
        return PassBytes(self.weight_bytes() - output - embedding - idle, output // self.vocab_size)

    def short_head(self, size: int) -> TorchShortHead:
        """Return an output head over ``size`` tokens; see ``Shortenable``."""
        assert isinstance(self._head, Dense), "pass_bytes tells"
        return TorchShortHead(self._head.weight, self._head.bias, size, self.scaled)

    def ends(self) -> tuple[Tensor, Linear, Norm | None]:
        """Return the parts that a drafting head shares with its target.

        These are the token embedding [vocab_size, embed_width], the output head and the norm before it.
        """
        return self._embedding, self._head, self._norm

    def drop_layers(self) -> None:
        """Free the layers, which another backend runs; the ends stay usable."""
        self._blocks = []

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a layer by Llama's names, fused matrices split.

        The layer must have a gated MLP and RMS norms, and its linear layers must be ``Dense``.
        """
        block, width = self._blocks[index], self.spec.width
        attention, mlp, norms = block.attention, block.mlp, block.norms.values()
        assert isinstance(mlp, GatedMLP), "the caller checks this"
        heads = attention.spec
        tensors = {
            **_split(attention.qkv, {"self_attn.q_proj": heads.query_width, **dict.fromkeys(_KV, heads.kv_width)}),
            **_split(attention.output, {"self_attn.o_proj": width}),
            **_split(mlp.gate_up, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), block.spec.dense.width)),
            **_split(mlp.down, {"mlp.down_proj": width}),
        }
        for name, norm in zip(("input_layernorm", "post_attention_layernorm"), norms, strict=True):
            assert norm.weight is not None
            tensors[f"{name}.weight"] = norm.weight
        if attention.qk_norm is not None:
            qk_norms = {"q": attention.qk_norm[0], "k": attention.qk_norm[heads.heads]}
            tensors |= {f"self_attn.{part}_norm.weight": weight for part, weight in qk_norms.items()}
        return tensors

    def weight_bytes(self) -> int:
        """Return the bytes of all weights, adapters included. Tied weights are counted once."""
        tensors = [*self._kept, *(tensor for linear in self.linears() for tensor in linear.tensors())]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token; see ``Counted``."""
        others = [matrix for matrix in (self._project_in, self._project_out) if matrix is not None]
        experts = (block.mlp.used_multiply_adds() for block in self._blocks if isinstance(block.mlp, Experts))
        others += [mixer.gates.weight for mixer in self._recurrent_mixers() if mixer.gates is not None]
        matrices = (linear.tensors()[0].numel() for linear in self.linears())
        return sum(matrices) + sum(matrix.numel() for matrix in others) + sum(experts)
