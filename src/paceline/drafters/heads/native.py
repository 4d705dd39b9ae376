"""Heads on the CPU kernels: weights, hidden states and decoder; ``NativeDrafting`` makes the draft tokens.

``csrc/head.cpp`` computes what ``heads.feature`` does, with packed weights; ``csrc/forward.cpp`` runs the layers. Keys,
values and fused hidden states are stored as for a head in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.decoder import FusedStates, HeadDecoder, HeadModel
from paceline.drafters.heads.feature import FeatureHead
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.mtp import MtpHead
from paceline.errors import ModelFormatError
from paceline.kernels import abi, native
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.spec import BlockConvWeights, FusionWeights, LayerWeights, LinearWeights, NativeSpec, ReadMatrix
from paceline.models.base import PassBytes, ShortHead
from paceline.models.decoding.draft_vocabulary import NEVER
from paceline.models.decoding.native_draft import NativeDrafting
from paceline.models.native.model import HEAD_FORMAT, LAYER_FORMAT, NativeModel, Quantization, idle_expert_bytes
from paceline.models.native.packing import PackedDecoder, packed_size
from paceline.models.native.short_head import PackedShortHead, column_bytes
from paceline.models.native.spec import check_reference, check_spec, halves_padded, obstacle_of, spec_of


class NativeHead(HeadModel):
    """A head with packed weights: bf16 (quantization None), int8 or int4. It keeps no reference to the torch head.

    target: a target on the CPU kernels whose embedding and output head it uses; None: it has its own.
    readers: make matrices of the target's own head while they are packed, see ``spec_of``.

    Raises ModelFormatError if the kernels cannot run it.
    """

    paged = True

    def __init__(
        self,
        head: Head,
        name: str,
        taps: Sequence[int],
        max_positions: int,
        *,
        quantization: Quantization | None = None,
        target: NativeModel | None = None,
        readers: Mapping[str, ReadMatrix] | None = None,
    ) -> None:
        super().__init__(head, name, taps, max_positions)
        if isinstance(head, MtpHead):
            spec = spec_of_own_head(head, max_positions, readers)
        else:
            spec = spec_of_head(head, max_positions)
        ends = None if target is None else target.packed_decoder
        kernels = native.required()
        formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
        self._packed = PackedDecoder(spec, formats, kernels, torch.get_num_threads(), ends_of=ends)
        self._bytes = packed_size(spec, *formats, shares_ends=ends is not None)
        self._layer_bytes = packed_size(spec, *formats, shares_ends=True) - idle_expert_bytes(spec, formats[0])
        self.drafted = len(head.targets)  # size of its vocabulary
        self._targets = head.targets.sort().values
        self.precision = f"{quantization or 'bfloat16'} on the CPU kernels {kernels.name}"

    @property
    def decoder(self) -> native.NativeDecoder:
        return self._packed.decoder

    def logits(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, self.width).float().contiguous()
        draft_logits = flat.new_empty(flat.shape[0], self.drafted)
        self.decoder.logits(flat, draft_logits)
        logits = draft_logits.new_full((flat.shape[0], self.vocab_size), NEVER)
        logits.index_copy_(-1, self._targets, draft_logits)
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def weight_bytes(self) -> int:
        return self._bytes

    @property
    def pass_bytes(self) -> PassBytes | None:
        if self.drafted < self.vocab_size:
            return None
        return PassBytes(self._layer_bytes, column_bytes(self._packed.model.head))

    def short_head(self, size: int) -> ShortHead:
        return PackedShortHead(self._packed, size)


def obstacle_of_head(config: HeadConfig) -> str | None:
    """Return why the kernels cannot run heads of this configuration; None if they can."""
    if config.kind in ("hidden_transfer", "chimera"):
        return "hidden transfer and Chimera heads run in torch only"
    return obstacle_of(replace(config.decoder, mtp=False))


def spec_of_head(head: Head, max_positions: int) -> NativeSpec:
    """Weights and sizes of a head for the kernels. Raises ModelFormatError if they cannot run it."""
    shape, config, state = head.config.decoder, head.config, head.state_dict()
    if obstacle := obstacle_of_head(config):
        raise ModelFormatError(obstacle)
    assert isinstance(head, FeatureHead | BlockHead)
    first, block = shape.layers[0].attention, config.block
    assert first.rotary is not None
    # Ties are broken by token id, which must be the target's. A block drafter's tokens are drawn elsewhere.
    order = head.targets.argsort() if block is None else torch.arange(len(head.targets))
    spec = NativeSpec(
        width=shape.width,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        vocab_size=config.draft_vocab_size,
        max_positions=max_positions + (0 if block is None else block.size),
        rotary=first.rotary,
        embedding=state["embed_tokens.weight"],
        final_norm=state["norm.weight"],
        layers=[_layer_of(config, index, state) for index in range(len(shape.layers))],
        head=LinearWeights(state["lm_head.weight"][order]),
        epsilon=shape.norm.eps,
        embed_scale=1.0 if block is None else block.embedding_scale,
        fusion=_fusion_of(head, head.targets[order], state),
    )
    check_spec(spec)
    return spec


def spec_of_own_head(head: MtpHead, max_positions: int, readers: Mapping[str, ReadMatrix] | None) -> NativeSpec:
    """Weights and sizes of a target's own head for the kernels. Raises ModelFormatError if they cannot run it."""
    ends = {"embed.weight": head.embed_tokens.weight, "head.weight": head.lm_head.weight}
    check_reference(head.config.decoder)
    spec = replace(spec_of(head.config.decoder, {**head.weights, **ends}, readers), max_positions=max_positions)
    check_spec(spec)
    return spec


def _layer_of(config: HeadConfig, index: int, state: Mapping[str, Tensor]) -> LayerWeights:
    name, attention = f"layers.{index}", config.decoder.layers[index].attention
    joined = index == 0 and config.block is None
    qkv = _linear(state, *(f"{name}.self_attn.{part}_proj" for part in "qkv"))
    return LayerWeights(
        qkv=halves_padded(qkv) if joined else qkv,
        attention_out=_linear(state, f"{name}.self_attn.o_proj"),
        gate_up=_linear(state, f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
        down=_linear(state, f"{name}.mlp.down_proj"),
        input_norm=state[f"{name}.input_layernorm.weight"],
        post_norm=state[f"{name}.post_attention_layernorm.weight"],
        q_norm=state.get(f"{name}.self_attn.q_norm.weight"),
        k_norm=state.get(f"{name}.self_attn.k_norm.weight"),
        window=attention.window,
        looks_ahead=config.block is not None and not config.block.is_causal(attention.window),
        convs=_convs_of(config, name, state),
    )


def _convs_of(
    config: HeadConfig, name: str, state: Mapping[str, Tensor]
) -> tuple[BlockConvWeights, BlockConvWeights] | None:
    group = 0 if config.block is None else config.block.conv_group
    if not group:
        return None
    parts = (f"{name}.{part}_conv" for part in ("attention", "mlp"))
    attention, mlp = (
        BlockConvWeights(state[f"{part}.base_kernel"], _linear(state, f"{part}.kernel_projection"), group)
        for part in parts
    )
    return attention, mlp


def _fusion_of(head: FeatureHead | BlockHead, targets: Tensor, state: Mapping[str, Tensor]) -> FusionWeights:
    """targets: ascending, as the output head's rows are ordered."""
    config = head.config
    norms = [state[f"fc_norm.{tap}.weight"] for tap in range(config.tap_count)] if config.fc_norm else None
    return FusionWeights(
        fuse=_linear(state, "fc"),
        hidden_norm=state["hidden_norm.weight" if config.block else "layers.0.hidden_norm.weight"],
        targets=targets,
        vocabulary=config.decoder.vocab_size,
        tap_count=config.tap_count,
        target_width=config.target_width,
        tap_norms=None if norms is None else torch.stack(norms),
        joint_norm=state["input_norm.weight"] if config.norm_before_fc else None,
        mask=head.mask() if isinstance(head, FeatureHead) else None,
        block=config.block is not None,
        mask_token=config.mask_token or 0,
        normed_residual=config.norm_before_residual,
        normed_state=config.norm_output,
    )


def _linear(state: Mapping[str, Tensor], *names: str) -> LinearWeights:
    """The rows of one layer after those of the other; all have a bias, or none has."""
    biases = [state[bias] for name in names if (bias := f"{name}.bias") in state]
    weight = torch.cat([state[f"{name}.weight"] for name in names])
    return LinearWeights(weight, torch.cat(biases) if biases else None)


class NativeFusedStates(FusedStates):
    """Hidden states fused by the kernels. Native rounds store them in the same call (``pl_round`` in ``csrc``)."""

    def __init__(self, model: NativeHead, rows: int, positions: int) -> None:
        super().__init__(model, rows, positions)
        self.model = model  # its weights fuse them
        self.described = abi.CKept(
            states=self.fused.data_ptr(),
            capacity=self.fused.shape[1] - 1,
            bf16=self.fused.dtype == torch.bfloat16,
        )

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        columns = rows.contiguous(), slots.contiguous(), features.float().contiguous()
        self.model.decoder.keep_fused(self.described, *columns)


class NativeHeadDecoder(HeadDecoder):
    """Reads and drafts in one call."""

    fused_states: NativeFusedStates
    native: NativeDrafting

    def __init__(
        self,
        model: NativeHead,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, backend, rows, positions, vocab_size, kv_dtype)
        self.fused_states = NativeFusedStates(model, rows, positions)
        kept = self.fused_states.described, self.fused_states
        self.native = NativeDrafting(self, model.decoder, first=1, kept=kept)

    def rewind(self, batch: Batch) -> None:
        """Nothing to rewind: draft tokens never count as read, and the last token is read again when needed."""

    def missing_tokens(self, batch: Batch) -> list[int]:
        return self.native.missing_tokens(batch)

    def prefill(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        self.native.read(batch, rows, starts, stops)
