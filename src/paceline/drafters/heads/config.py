"""Configuration of trained heads, read from config.json in the two layouts in which heads are published.

* speculators (vllm-project): the layers' shape in ``transformer_layer_config``, switches beside it, the target's name
  in ``speculators_config``.
* flat (SafeAILab/EAGLE, sgl-project/SpecForge): a Llama configuration with ``draft_vocab_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.fields import flag_of, list_of, number_of, object_of
from paceline.errors import ModelFormatError
from paceline.models.description.spec import DecoderSpec, ExpertsSpec
from paceline.models.families import FAMILIES, describe
from paceline.models.files.boundary import brief

Layout = Literal["speculators", "flat"]

_FAMILIES = ("llama", "qwen3")  # model_type of a head's own layers; the target's may differ
_COPIED = (*_FAMILIES, "qwen2")  # model_type of layers copied from the target
# model_type of targets whose checkpoints have a head of their own
_OWN = tuple(kind for kind, family in FAMILIES.items() if family.head is not None)
_FLAT_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_KINDS = {  # from speculators_model_type to the class name in speculators; the last two are paceline's own
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "hidden_transfer": "HiddenTransferSpeculator",
    "chimera": "ChimeraSpeculator",
}
_OTHER_KINDS = ("eagle", "mtp", "mlp", "independent")
_USUAL_TAP_COUNT = 3


@dataclass(frozen=True)
class HeadConfig:
    """Configuration of a head. There are five kinds:

    * EAGLE-3 and 3.1 (arXiv 2503.01840): decoder layers over a token's embedding and the target's hidden states.
    * Parallel (P-EAGLE, arXiv 2602.01469; ParallelSpec, arXiv 2410.05589): the same, with a mask in place of hidden
      states that the target has not computed, so that one pass makes all draft tokens.
    * Hidden transfer (arXiv 2404.12022): copies of the target's last layers, over the hidden state that enters them.
    * Chimera (arXiv 2402.15758): decoder layers over trigrams of tokens, and a residual head for each draft token.
    * Block (DFlash, DSpark, DFlash2): decoder layers over the last token and masks, see ``BlockSpec``.

    transformer: its layers as a Hugging Face configuration: model_type (llama or qwen3), hidden_size,
        intermediate_size, num_attention_heads, num_key_value_heads, num_hidden_layers, vocab_size (the target's), rope.
    target_width: width of the target's hidden states.
    draft_vocab_size: number of the target's tokens that it can predict.
    taps: the target's layers whose input hidden states it reads; None: the usual three, see ``taps_of``.
    norm_before_residual: whether the residual is the normed hidden state instead of the raw one.
    norm_before_fc: one norm over all hidden states side by side. fc_norm: one norm for each (EAGLE-3.1). At most one of
        them is set.
    norm_output: whether the next step reads the output of the last norm instead of its input (EAGLE-3.1).
    mask_token: the target's token whose embedding is part of the mask; None: a head without a mask.
    transfers: largest number of draft tokens of a hidden transfer head; 0: another kind.
    residual_heads: the same of a Chimera head, whose taps are 0 and the target's number of layers.
    block: what a block drafter computes; None: another kind.
    own: whether it is the target's own head (MTP), from the target's checkpoint.
    verifier, architectures: name and classes of the target, from the checkpoint.
    paying_rows: by device ("cpu", "cuda"), the largest batch for which it was measured to pay; empty: not measured.
    speculative_tokens: draft tokens that the checkpoint suggests. paceline's length policies ignore it.

    Raises ModelFormatError for configurations that cannot run.
    """

    transformer: Mapping[str, Any]
    target_width: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None
    transfers: int = 0
    residual_heads: int = 0
    block: BlockSpec | None = None
    own: bool = False
    verifier: str = ""
    architectures: tuple[str, ...] = ()
    paying_rows: Mapping[str, int] = field(default_factory=dict, compare=False)
    speculative_tokens: int = field(default=3, compare=False)

    def __post_init__(self) -> None:
        decoder = self.decoder
        if not decoder.layers:
            raise ModelFormatError("the head's configuration has no layers")
        attention, mlp = decoder.layers[0].attention, decoder.layers[0].mlp
        one = mlp.expert if isinstance(mlp, ExpertsSpec) else mlp
        assert one is not None, "families with heads have an MLP in every layer"
        inner = one.width
        sizes = (decoder.width, inner, attention.heads, attention.kv_heads, attention.head_dim)
        wrong = {
            "a size that is not positive": min(*sizes, self.target_width, self.draft_vocab_size) < 1,
            f"{attention.heads} heads over {attention.kv_heads} key heads": attention.heads % max(1, attention.kv_heads)
            != 0,
            "an odd head_dim": attention.head_dim % 2 != 0,
            f"draft_vocab_size {self.draft_vocab_size} beyond vocab_size": self.draft_vocab_size > decoder.vocab_size,
            "both norm_before_fc and fc_norm": self.norm_before_fc and self.fc_norm,
            f"hidden states of layers {self.taps}": self.taps is not None and not _are_layers(self.taps),
            f"mask_token_id {self.mask_token} outside of vocab_size": not 0
            <= (self.mask_token or 0)
            < decoder.vocab_size,
            "transfers together with settings of other kinds of heads": self.transfers > 0
            and not self._only_transfers(),
            "residual_heads together with settings of other kinds of heads": self.residual_heads > 0
            and not self._only_residual_heads(),
            **self._wrong_block(),
        }
        if problems := [what for what, there in wrong.items() if there]:
            raise ModelFormatError(f"the head's configuration has {' and '.join(problems)}")

    def _wrong_block(self) -> dict[str, bool]:
        """What may be wrong with a block drafter, and whether it is."""
        if (block := self.block) is None:
            return {}
        return {
            f"mask_token_id {block.mask_token} outside of vocab_size": not 0
            <= block.mask_token
            < self.decoder.vocab_size,
            "a selector over a reduced vocabulary": block.selector_rank > 0
            and self.draft_vocab_size < self.decoder.vocab_size,
            f"a selector of {block.selector_top_k} tokens": block.selector_top_k > self.draft_vocab_size,
            f"conv_group_size {block.conv_group}, which does not divide hidden_size": block.conv_group > 0
            and self.width % block.conv_group != 0,
        }

    @cached_property
    def decoder(self) -> DecoderSpec:
        """Shape of the layers; the vocabulary is the target's."""
        kind = self.transformer.get("model_type")
        families = _OWN if self.own else _COPIED if self.transfers else _FAMILIES
        if kind not in families:
            raise ModelFormatError(
                f"the head's layers are of model_type {brief(repr(kind))}; only {' and '.join(families)} can be run"
            )
        decoder = describe(self.transformer)
        if decoder is None:
            raise ModelFormatError("the head's layers have an activation, a rope or windows that cannot be run")
        return replace(decoder, mtp=True) if self.own else decoder

    @property
    def width(self) -> int:
        return self.decoder.width

    def _only_transfers(self) -> bool:
        """Whether it has no settings of other kinds, one hidden state as wide as its layers, and no sliding window."""
        windows = {attention.window for attention in self.decoder.attentions}
        return self._is_plain() and self.tap_count == 1 and windows == {None}

    def _only_residual_heads(self) -> bool:
        """Whether it has no settings of other kinds, and reads the embedding and one more hidden state."""
        reads_two = self.taps is not None and len(self.taps) == 2 and self.taps[0] == 0
        return self._is_plain() and not self.transfers and reads_two

    def _is_plain(self) -> bool:
        """Whether it has no switches, no mask, and the target's width."""
        switched = any(getattr(self, name) for name in _SWITCHES)
        return not switched and self.mask_token is None and self.target_width == self.width

    @property
    def kind(self) -> str:
        """Kind of the head, as ``paceline train-draft`` names it."""
        if self.own:
            return "mtp"
        if self.block is not None:
            return self.block.kind
        by_setting = {"hidden_transfer": self.transfers, "chimera": self.residual_heads, "parallel": self.parallel}
        return next((kind for kind, has_it in by_setting.items() if has_it), "feature")

    @property
    def max_draft_tokens(self) -> int | None:
        """Longest draft; None: no limit."""
        if self.block is not None:
            return self.block.most_drafted
        return self.transfers or self.residual_heads or None

    @property
    def parallel(self) -> bool:
        """Whether it reads a mask instead of its own draft tokens."""
        return self.mask_token is not None

    @property
    def tap_count(self) -> int:
        """Number of the target's hidden states per token that are fused."""
        return _USUAL_TAP_COUNT if self.taps is None else len(self.taps)

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """Layers whose input is read, of a target with ``layers`` layers. Raises ModelFormatError if one is missing."""
        taps = (2, layers // 2, layers - 3) if self.taps is None else self.taps
        fits = taps == (0, layers) if self.residual_heads else all(0 <= tap < layers for tap in taps)
        if not fits:
            raise ModelFormatError(
                f"the head reads the inputs of the target's layers {taps}; this target has {layers} layers, 0 to "
                f"{layers - 1}"
            )
        return taps

    @staticmethod
    def read(fields: Mapping[str, Any]) -> tuple[HeadConfig, Layout]:
        """The configuration in a config.json and its layout. Raises ModelFormatError, which says what is wrong."""
        layout = layout_of(fields)
        if layout is None:
            raise ModelFormatError("config.json is not of a head: neither speculators_model_type nor draft_vocab_size")
        if fields.get("quantization_config"):
            raise ModelFormatError("heads with quantised weights are not supported; use one in float32 or bfloat16")
        return (_from_speculators(fields) if layout == "speculators" else _from_flat(fields)), layout

    def written(self) -> dict[str, Any]:
        """Fields of config.json in the speculators layout. Those of block drafters: ``block_layouts.written``."""
        kind = {"feature": "eagle3", "parallel": "peagle"}.get(self.kind, self.kind)
        more: dict[str, Any] = {"mask_token_id": self.mask_token} if self.parallel else {}
        more |= {name: getattr(self, name) for name in _MOST_DRAFTED if getattr(self, name)}
        taps = None if self.taps is None else list(self.taps)
        switches = {name: getattr(self, name) for name in _SWITCHES}
        return self.common_fields(kind, _KINDS[kind]) | {"eagle_aux_hidden_state_layer_ids": taps} | switches | more

    def common_fields(self, kind: str, architecture: str) -> dict[str, Any]:
        """Fields that heads of all kinds have in the speculators layout. kind, architecture: their names there."""
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.speculative_tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        target = {"name_or_path": self.verifier or None, "architectures": list(self.architectures)}
        ours = {"paceline": {"paying_rows": dict(self.paying_rows)}} if self.paying_rows else {}
        return {
            "architectures": [architecture],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": target,
            },
            "transformer_layer_config": dict(self.transformer),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_width,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            **ours,
        }


def layout_of(fields: Mapping[str, Any]) -> Layout | None:
    """Layout of a head's config.json; None if it is a model's."""
    if "speculators_model_type" in fields:
        return "speculators"
    eagle = any("Eagle" in str(name) for name in list_of(fields, "architectures"))
    return "flat" if eagle or "draft_vocab_size" in fields else None


def _are_layers(taps: tuple[int, ...]) -> bool:
    return len(taps) > 0 and len(set(taps)) == len(taps) and min(taps) >= 0


def _from_speculators(fields: Mapping[str, Any]) -> HeadConfig:
    kind = fields["speculators_model_type"]
    if kind not in _KINDS:
        known = f"{kind} heads are not supported" if kind in _OTHER_KINDS else f"{brief(repr(kind))} is unknown"
        raise ModelFormatError(f"speculators_model_type: {known}; supported are {', '.join(_KINDS)}")
    if kind in _NEEDS and fields.get(_NEEDS[kind]) is None:
        raise ModelFormatError(f"the head's configuration lacks {_NEEDS[kind]}, which a {kind} head needs")
    drafted: dict[str, Any] = {name: number_of(fields, name, 0) for name in _MOST_DRAFTED if _NEEDS.get(kind) == name}
    for name, count in drafted.items():
        if not 0 < count <= MAX_SPECULATION_LENGTH:
            raise ModelFormatError(f"{name} of the head's configuration is 1 to {MAX_SPECULATION_LENGTH}, not {count}")
    transformer = object_of(fields, "transformer_layer_config")
    transformer = {"model_type": "qwen3"} | transformer  # the default of the format
    config = object_of(fields, "speculators_config")
    verifier, methods = object_of(config, "verifier"), list_of(config, "proposal_methods")
    method = methods[0] if methods and isinstance(methods[0], dict) else {}
    switches: dict[str, Any] = {name: flag_of(fields, name) for name in _SWITCHES}
    return HeadConfig(
        transformer,
        **sizes_of(fields, transformer),
        taps=_taps(fields, 0),
        **switches,
        mask_token=number_of(fields, "mask_token_id", 0) if kind == "peagle" else None,
        **drafted,
        verifier=str(verifier.get("name_or_path") or ""),
        architectures=tuple(map(str, list_of(verifier, "architectures"))),
        speculative_tokens=number_of(method, "speculative_tokens", 3),
        paying_rows=paying_rows_of(fields),
    )


def _from_flat(fields: Mapping[str, Any]) -> HeadConfig:
    found = list_of(fields, "architectures")
    if found and found[0] not in _FLAT_ARCHITECTURES:
        raise ModelFormatError(
            f"the head's architecture {brief(repr(found[0]))} is not supported; only "
            f"{' and '.join(_FLAT_ARCHITECTURES)} are"
        )
    eagle = object_of(fields, "eagle_config")
    if not flag_of(eagle, "use_aux_hidden_state", True):
        raise ModelFormatError("eagle_config.use_aux_hidden_state is false: EAGLE-1 heads are not supported")
    if found := [name for name in _FLAT_PARALLEL if fields.get(name) not in (None, False)]:
        raise ModelFormatError(f"{found[0]}: parallel heads are supported only in the layout of speculators (peagle)")
    if number_of(fields, "num_hidden_layers", 1) != 1:
        raise ModelFormatError(f"num_hidden_layers={brief(fields['num_hidden_layers'])}: this layout has 1 layer")
    transformer = {name: value for name, value in fields.items() if name not in _NO_LAYERS} | {"model_type": "llama"}
    switches = {name: flag_of(fields, name) or flag_of(eagle, name) for name in _SWITCHES}
    sizes: dict[str, Any] = {**sizes_of(fields, transformer), **switches}
    return HeadConfig(transformer, **sizes, taps=_taps(fields, 0) or _taps(eagle, 1))


_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_MOST_DRAFTED = ("transfers", "residual_heads")
_NEEDS = {"peagle": "mask_token_id", "hidden_transfer": "transfers", "chimera": "residual_heads"}
_FLAT_PARALLEL = ("parallel_drafting", "ptd_token_id", "pard_token")
_NO_LAYERS = (*_SWITCHES, "architectures", "eagle_config", "draft_vocab_size", "target_hidden_size", "auto_map")


def sizes_of(fields: Mapping[str, Any], transformer: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``target_width`` and ``draft_vocab_size`` of a head. Raises ModelFormatError if a size is missing."""
    missing = [name for name in _NEEDED if name not in transformer]
    if missing:
        raise ModelFormatError(f"the head's configuration lacks {', '.join(missing)}")
    for name in _NEEDED:
        number_of(transformer, name, 0)
    width = fields.get("target_hidden_size") or transformer["hidden_size"]
    vocabulary = fields.get("draft_vocab_size") or transformer["vocab_size"]
    sizes = {"target_width": width, "draft_vocab_size": vocabulary}
    return {name: number_of(sizes, name, 0) for name in sizes}


_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def _taps(fields: Mapping[str, Any], shift: int) -> tuple[int, ...] | None:
    """Layers whose input is read. shift: 1 if the file names layers by their outputs, else 0."""
    layers = list_of(fields, "eagle_aux_hidden_state_layer_ids")
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise ModelFormatError(f"eagle_aux_hidden_state_layer_ids are whole numbers, not {brief(layers)}")
    return tuple(layer + shift for layer in layers) or None


def paying_rows_of(fields: Mapping[str, Any]) -> dict[str, int]:
    """``paying_rows`` from paceline's own section of config.json."""
    ours = object_of(fields, "paceline")
    rows = {device: number_of(object_of(ours, "paying_rows"), device, 0) for device in object_of(ours, "paying_rows")}
    if not rows.keys() <= {"cpu", "cuda"} or min(rows.values(), default=1) < 1:
        raise ModelFormatError(
            f"paying_rows of the head's configuration must map 'cpu' and 'cuda' to numbers from 1 up, not {brief(rows)}"
        )
    return rows
