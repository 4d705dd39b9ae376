"""Configuration of block drafters in config.json: read in the layouts in which they are published, written in one.

* dflash (z-lab, SpecForge): a Qwen3 configuration, with the block's settings in ``dflash_config`` or beside it.
* deepspec: the same settings beside the layers'; every row of the block drafts.
* muse_glimmer: the assistant of transformers.
* speculators (vllm-project): the layers in ``transformer_layer_config``. This one is written.

A key that is not known is refused: it may change what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from transformers import Qwen3Config

from paceline.drafters.heads.block_spec import BLOCK_KINDS, BlockSpec
from paceline.drafters.heads.config import HeadConfig, paying_rows_of, sizes_of
from paceline.drafters.heads.fields import flag_of, list_of, number_of, object_of, real_of
from paceline.errors import ModelFormatError
from paceline.models.files.boundary import brief

BlockLayout: TypeAlias = Literal["dflash", "deepspec", "muse_glimmer", "speculators"]

_ARCHITECTURES: dict[str, BlockLayout] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "DSparkDraftModel": "dflash",
    "Qwen3DSparkModel": "deepspec",
    "MuseGlimmerAssistantModel": "muse_glimmer",
    "DFlashSpeculator": "speculators",
    "DFlash2Speculator": "speculators",
    "DSparkSpeculator": "speculators",
}
_MUSE = "muse_glimmer_assistant"
_PARTS_OF_NAMES = ("DFlash", "DSpark", "DFlare", "Domino")  # in the classes of block drafters of any kind

_SELECTOR = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
_MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_BLOCK = ("block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor", *_SELECTOR, *_MARKOV, *_SCALES)
# Keys of training, or of what other programs do with the drafter.
_OF_TRAINING = ("num_anchors", "max_anchors", "training_block_size", "confidence_head_alpha")
_OF_PROGRAMS = ("auto_map", "torch_dtype", "num_target_layers", "projector_type", "paceline")
_SWITCHES: Mapping[str, tuple[Any, ...]] = {  # key -> values that change nothing here
    "attention_sink_bias": (None, False),
    "use_aux_hidden_state": (None, True),
    "logit_scale": (None, 1, 1.0),
    "shift_label": (None, False),
}
_OF_SPECULATORS = (
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"),
    *("aux_hidden_state_layer_ids", "sliding_window_non_causal", "draft_vocab_size"),
    *("target_hidden_size", "embed_requires_grad", "has_no_defaults_at_init"),
)


class Rules(NamedTuple):
    """What a layout's keys mean. after: what to add to a layer's id to get the tap, which is the input of a layer.

    anchor_first, causal: see ``BlockSpec``, where the keys do not say. wider: what to add to a sliding window.
    """

    after: int
    anchor_first: bool = False
    causal: bool | None = None
    wider: int = 0


def block_layout_of(fields: Mapping[str, Any]) -> BlockLayout | None:
    """Layout of a block drafter's config.json; None if it is something else.

    Raises ModelFormatError for block drafters of kinds that are not read.
    """
    if fields.get("speculators_model_type") in BLOCK_KINDS:
        return "speculators"
    if "speculators_model_type" in fields:
        return None
    if fields.get("model_type") == _MUSE:
        return "muse_glimmer"
    names = [str(name) for name in list_of(fields, "architectures")]
    layout = next((_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES), None)
    if layout is not None:
        return layout
    if named := [name for name in names if any(part in name for part in _PARTS_OF_NAMES)]:
        known = ", ".join(_ARCHITECTURES)
        raise ModelFormatError(f"block drafters of the class {brief(named[0])} are not supported; only {known} are")
    return "dflash" if "dflash_config" in fields else "deepspec" if "markov_rank" in fields else None


def read_block(fields: Mapping[str, Any], layout: BlockLayout, vocab_size: int | None = None) -> HeadConfig:
    """The configuration of a block drafter. vocab_size: the target's, for layouts that do not state it.

    Raises ModelFormatError, which says what is wrong.
    """
    if fields.get("quantization_config"):
        raise ModelFormatError("block drafters with quantised weights are not supported; use one in bfloat16")
    if layout == "speculators":
        return _from_speculators(fields)
    inner = object_of(fields, "dflash_config")
    settings = {**fields, **inner}
    _check_kind(settings)
    _refuse_others(inner, (*_BLOCK, *_OF_TRAINING, "projector_type", "causal", "use_swa", "swa_window_size"))
    own = (*_BLOCK, *_OF_TRAINING, *_OF_PROGRAMS, "dflash_config", "is_causal", "target_hidden_size")
    _refuse_others(fields, (*own, "draft_vocab_size", *_of_layers(), *_older_ropes()))
    transformer = _layers(fields, own, vocab_size, rules := _rules(settings, layout))
    _check_windows(inner, transformer)
    return HeadConfig(
        transformer,
        **sizes_of(fields, transformer),
        taps=_taps(settings, "target_layer_ids", rules.after, transformer),
        block=_block(settings, rules),
        paying_rows=paying_rows_of(fields),
    )


def written(config: HeadConfig) -> dict[str, Any]:
    """Fields of config.json in the speculators layout, for the kind that is trained, DSpark."""
    block = config.block
    assert block is not None, "the configuration is of another kind"
    assert block.kind == "dspark", "other kinds have more settings"
    return config.common_fields(block.kind, "DSparkSpeculator") | {
        "aux_hidden_state_layer_ids": list(config.taps or ()),
        "block_size": block.size,
        "mask_token_id": block.mask_token,
        "sample_from_anchor": block.anchor_first,
        "markov_rank": block.markov_rank,
        "markov_head_type": block.markov,
        "enable_confidence_head": block.confidence,
        "confidence_head_with_markov": block.confidence_reads_token,
    }


def _rules(settings: Mapping[str, Any], layout: BlockLayout) -> Rules:
    causal = settings.get("is_causal", settings.get("causal"))
    if causal is not None and not isinstance(causal, bool):
        raise ModelFormatError(f"is_causal of the block drafter must be true or false, not {brief(repr(causal))}")
    if layout == "muse_glimmer":
        return Rules(after=1, causal=False, wider=1)  # its window counts the keys before a row, without its own
    names = settings.get("architectures") or []
    drafts = layout == "deepspec" or settings.get("projector_type") == "dspark" or "DSparkDraftModel" in names
    if number_of(settings, "markov_rank", 0) and not drafts and "sample_from_anchor" not in settings:
        raise ModelFormatError(
            "markov_rank without sample_from_anchor: the block drafter's configuration does not tell whether the row "
            "of the last token drafts; add sample_from_anchor, true if it does"
        )
    return Rules(after=1, anchor_first=flag_of(settings, "sample_from_anchor", drafts), causal=causal)


def _check_kind(settings: Mapping[str, Any]) -> None:
    """Raise ModelFormatError for settings that would change what is computed."""
    projector = settings.get("projector_type")
    if projector not in (None, "dflash", "dspark", "dflash2"):
        raise ModelFormatError(f"block drafters of projector_type {brief(repr(projector))} are not supported")
    for name, harmless in _SWITCHES.items():
        if settings.get(name) not in harmless:
            raise ModelFormatError(f"{name}={brief(repr(settings[name]))} of the block drafter is not supported")


def _check_windows(inner: Mapping[str, Any], transformer: Mapping[str, Any]) -> None:
    """Raise ModelFormatError if ``dflash_config`` asks for windows other than those of the layers."""
    if not flag_of(inner, "use_swa"):
        return
    kinds, window = set(transformer.get("layer_types") or ()), transformer.get("sliding_window")
    if "sliding_attention" not in kinds or inner.get("swa_window_size", window) != window:
        raise ModelFormatError("use_swa of dflash_config is supported only where layer_types and sliding_window agree")


def _refuse_others(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if others := sorted(fields.keys() - set(known) - _SWITCHES.keys()):
        raise ModelFormatError(
            f"the block drafter's configuration has the unknown keys {brief(', '.join(others))}: they may change what "
            "it computes"
        )


def _of_layers() -> tuple[str, ...]:
    """Keys of a Qwen3 configuration, as transformers writes it."""
    return (*Qwen3Config().to_dict(), "model_type", "head_dim", "_name_or_path", "_attn_implementation")


def _older_ropes() -> tuple[str, ...]:
    return ("rope_theta", "rope_scaling")


def _layers(fields: Mapping[str, Any], own: tuple[str, ...], vocab_size: int | None, rules: Rules) -> dict[str, Any]:
    """The layers' shape as a Qwen3 configuration."""
    dropped = {*own, *_SWITCHES, "architectures", "draft_vocab_size"}
    transformer = {name: value for name, value in fields.items() if name not in dropped} | {"model_type": "qwen3"}
    if vocab_size is not None:
        transformer.setdefault("vocab_size", vocab_size)
    kinds = transformer.get("layer_types")
    if isinstance(kinds, list):
        transformer["use_sliding_window"] = "sliding_attention" in kinds  # without it the window is dropped
    if rules.wider and isinstance(transformer.get("sliding_window"), int):
        transformer["sliding_window"] += rules.wider
    return transformer


def _block(settings: Mapping[str, Any], rules: Rules) -> BlockSpec:
    if missing := [name for name in ("block_size", "mask_token_id") if settings.get(name) is None]:
        raise ModelFormatError(f"the block drafter's configuration lacks {', '.join(missing)}")
    return BlockSpec(
        size=number_of(settings, "block_size", 0),
        mask_token=number_of(settings, "mask_token_id", 0),
        anchor_first=rules.anchor_first,
        causal=rules.causal,
        markov_rank=number_of(settings, "markov_rank", 0),
        markov=settings.get("markov_head_type") or "vanilla",
        confidence=flag_of(settings, "enable_confidence_head"),
        confidence_reads_token=flag_of(settings, "enable_confidence_head")
        and flag_of(settings, "confidence_head_with_markov"),
        selector_rank=number_of(settings, "selector_rank", 0),
        selector_top_k=number_of(settings, "selector_top_k", 0),
        conv_kernel=number_of(settings, "conv_kernel_size", 0),
        conv_group=number_of(settings, "conv_group_size", 0),
        embedding_scale=real_of(settings, "input_embedding_scale", 1.0),
        output_multiplier=real_of(settings, "output_multiplier", 1.0),
        logits_cap=real_of(settings, "final_logit_softcapping", 0.0) or None,
    )


def _taps(settings: Mapping[str, Any], name: str, after: int, transformer: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose input is read. Without a list: layers of the target at equal distances, as z-lab takes them."""
    ids = list_of(settings, name) or _usual_ids(settings, transformer)
    if not all(type(layer) is int for layer in ids):
        raise ModelFormatError(f"{name} are whole numbers, not {brief(ids)}")
    return tuple(layer + after for layer in ids)


def _usual_ids(settings: Mapping[str, Any], transformer: Mapping[str, Any]) -> list[int]:
    layers, depth = number_of(settings, "num_target_layers", 0), number_of(transformer, "num_hidden_layers", 1)
    if layers < 4:
        raise ModelFormatError("the block drafter's configuration lacks target_layer_ids and num_target_layers")
    return [layers // 2] if depth == 1 else [round(1 + i * (layers - 4) / (depth - 1)) for i in range(depth)]


def _from_speculators(fields: Mapping[str, Any]) -> HeadConfig:
    kind = fields["speculators_model_type"]
    own = (*_BLOCK, *_OF_TRAINING, *_OF_PROGRAMS, *_OF_SPECULATORS, "architectures", "dtype", "transformers_version")
    _refuse_others(fields, (*own, "tie_word_embeddings", "model_type"))
    _check_kind(fields)
    layers = object_of(fields, "transformer_layer_config")
    if layers.get("model_type", "qwen3") != "qwen3":
        kinds = f"the block drafter's layers are of model_type {brief(repr(layers['model_type']))}"
        raise ModelFormatError(f"{kinds}; only qwen3 can be run")
    _refuse_others(layers, (*_of_layers(), *_older_ropes()))
    anchor_first = flag_of(fields, "sample_from_anchor", kind == "dspark")
    if kind == "dflash2" and anchor_first:
        raise ModelFormatError("sample_from_anchor of a dflash2 drafter must be false")
    rules = Rules(0, anchor_first, False if flag_of(fields, "sliding_window_non_causal") else None)
    defaults = {"conv_kernel_size": 3, "conv_group_size": 64} if kind == "dflash2" else {}
    settings = {"block_size": 8, **defaults, **{name: value for name, value in fields.items() if value is not None}}
    transformer = _layers(layers, (), None, rules)
    verifier = object_of(object_of(fields, "speculators_config"), "verifier")
    return HeadConfig(
        transformer,
        **sizes_of(fields, transformer),
        taps=_taps(settings, "aux_hidden_state_layer_ids", 0, transformer),
        block=_block(settings, rules),
        verifier=str(verifier.get("name_or_path") or ""),
        architectures=tuple(map(str, list_of(verifier, "architectures"))),
        paying_rows=paying_rows_of(fields),
    )
