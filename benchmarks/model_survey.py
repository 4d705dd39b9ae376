"""Every generative text model of the installed transformers, shrunk: how it runs here, and whether it is right.

    PYTHONPATH=src:. python -m benchmarks.model_survey [--only TYPE,TYPE] [--output FILE]

Each model type gets a configuration of a few small layers and random weights, is saved, and is loaded from its files by
``LLM`` in float32 and in its default precision. Greedy texts and the log probabilities of two prompts are compared with
transformers' own. docs/models.md shows the table; ``benchmarks/results/model-survey.json`` holds it with all reasons.

States: kernels (native, on the CPU kernels), torch (native, in torch), transformers (through transformers' own code),
whole texts (likewise, but every pass computes whole texts), refused (with the message), wrong (what differs), untried
(``NOT_TRIED``, or transformers itself does not run the shrunk model).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

VOCABULARY = 384
LIMIT_S = 120.0  # per model type; a shrunk model takes 2 to 10 s
TOLERANCE = 1e-3  # of a log probability in float32
BFLOAT16_TOLERANCE = 0.1  # where float32 is not run; four families in bfloat16 were off by 0.01 to 0.03

# Fields of configurations by their usual names; a field that a class does not have is left out.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "mlp_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "attention_groups"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "kv_channels"), 16),
    "rotary_dim": 8,
    "qk_rope_head_dim": 16,  # with kv_lora_rank a width that the kernels have
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"), 512),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    "sliding_window": 8,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True}
_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
}
_SECTIONS_OF_HALF: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }
}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), _SECTIONS_OF_HALF),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), _SECTIONS),
    "mamba2": {"num_heads": 8},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {**_PLAIN, "mrope_section": [3, 3, 2]},
    },
    "paddleocr_vl_text": {"rope_parameters": {**_PLAIN, "mrope_section": [2, 3, 3]}},
    "granite_docling_vision": {"out_hidden_size": 64},
    "inkling2_vision": {"text_hidden_size": 64},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "phimoe": {"sliding_window": 512},  # as long as its positions, as it is published
    **dict.fromkeys(("cosmos3_edge_text", "qwen2_5_omni_text", "qwen3_omni_moe_text"), _SECTIONS),
    "hy_v4_vl_text": _SECTIONS,
    "parakeet_encoder": {"projection_hidden_size": 64, "projection_bias": False},
    "radio": {"video_temporal_patch_size": 2},
    "hunyuan_vl_text": {"rope_parameters": {**_PLAIN, "mrope_section": [2, 2, 2, 2]}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "muse_spark_audio": {"out_hidden_size": 64},
    "wavtokenizer_encoder": {"codebook_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [0, 0, 4, 4]},
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "qwen2_5_omni_audio_encoder": {"encoder_attention_heads": 4},
    "qwen3_omni_moe_audio_encoder": {"encoder_attention_heads": 4},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4, "num_key_value_heads": 4},
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48]},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "molmo2_vision": {"image_size": [32, 32]},
    "molmo2_adapter": {"vision_feature_layer": [-1]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [], "downsample_rate": "1/2"},
}
"""By model_type: fields that do not follow from ``SIZES``."""

NOT_TRIED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pix2struct"),
            *("pp_formulanet", "vision-encoder-decoder"),
        ),
        "it writes no text without a picture",
    ),
    **dict.fromkeys(
        ("fast_vlm", "gemma3n", "perception_lm"), "its picture encoder is of the package timm, which is not installed"
    ),
    **dict.fromkeys(("florence2", "t5gemma2"), "its decoder runs behind an encoder alone"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it drafts for a Gemma 4, beside it alone"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "it writes sound"),
    "udop": "it reads the places of words on a page",
    "evolla": "it reads proteins",
    "pi0": "it moves robots",
    "xmod": "it needs a language to be chosen",
}
"""Types whose models do not continue a text, and why."""


def shrunk(kind: type[Any]) -> dict[str, Any]:
    """Return fields of a small configuration of this class, those of its parts included."""
    names = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in SIZES.items() if name in names}
    fields |= {name: value for name, value in SPECIAL.items() if name in names}
    for name, part in getattr(kind, "sub_configs", {}).items():
        default = getattr(kind, "sub_configs_defaults", {}).get(name)
        fields[name] = _shrunk_part(part, default)
    if "qk_rope_head_dim" in names:  # latent attention: each head has keys of its own, and a part of them is rotated
        own = {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
        fields |= {name: value for name, value in own.items() if name in names}
    return fields | dict(OVERRIDES.get(getattr(kind, "model_type", ""), {}))


def _shrunk_part(part: type[Any], default: Any) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    model_type = getattr(default, "model_type", None) or getattr(part, "model_type", None)
    kind = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else part  # noqa: SIM401 (its get does not load)
    return shrunk(kind) | ({"model_type": model_type} if model_type else {})


def model_types() -> list[str]:
    """Return every model_type whose model writes text token by token."""
    from transformers.models.auto import modeling_auto

    return sorted(
        {
            *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        }
    )


def saved(model_type: str, path: Path) -> Any:
    """Make a random model of the type, save it, and return it."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        PreTrainedTokenizerFast,
    )

    kind = CONFIG_MAPPING[model_type]
    config = kind(**shrunk(kind))
    auto = AutoModelForCausalLM if kind in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape) * (0.1 if weight.dim() > 1 else 0.2))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    words = {f"<{number}>": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", eos_token="<2>").save_pretrained(path)
    return model


def difference_in_float32(model_type: str, path: Path) -> str | None:
    """Save a model of the type; return what differs from transformers in float32, None if nothing does."""
    wanted = _transformers_answers(saved(model_type, path))
    return _difference(wanted, _own_answers(str(path), "float32")[0], TOLERANCE, texts=True)


def tried(model_type: str) -> dict[str, Any]:
    """Try one model type. Returns its state and, where there is one, the reason."""
    if model_type in NOT_TRIED:
        return {"state": "untried", "reason": NOT_TRIED[model_type]}
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = saved(model_type, Path(folder))
            wanted = _transformers_answers(model)
        except Exception as error:  # noqa: BLE001 (a shrunk configuration that a model does not take)
            return {"state": "untried", "reason": _short(error)}
        refusal: Exception | None = None
        difference: str | None = None
        try:
            answers, _ = _own_answers(folder, "float32")
            difference = _difference(wanted, answers, TOLERANCE, texts=True)
        except Exception as error:  # noqa: BLE001 (a refusal is a PacelineError; anything else is reported by its name)
            refusal = error
        try:
            answers, state = _own_answers(folder, "auto")
        except Exception as error:  # noqa: BLE001
            precision = "in bfloat16 only: " if refusal is None else ""
            return {"state": "refused", "reason": precision + _short(error), "error": type(error).__name__}
        if refusal is not None:  # only the CPU kernels run gpt-oss, and not in float32
            difference = _difference(wanted, answers, BFLOAT16_TOLERANCE, texts=False)
        if difference is not None:
            return {"state": "wrong", "reason": difference}
    return {"state": state}


PROMPTS = [[5, 17, 9, 101, 33, 8, 250, 77, 12, 301, 64, 2 + 9, 90, 14], [7, 300, 21]]
Answers = list[
    tuple[list[int], list[float]]
]  # generated tokens, log probabilities of the prompt's tokens from the second


def _transformers_answers(model: Any) -> Answers:
    import torch

    answers = []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = prompt[:]
            for _ in range(6):
                tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
            scores = [float(logits[place, token]) for place, token in enumerate(prompt[1:])]
            answers.append((tokens[len(prompt) :], scores))
    return answers


def _own_answers(folder: str, dtype: Literal["float32", "auto"]) -> tuple[Answers, str]:
    from paceline.config import SamplingParams
    from paceline.llm import LLM
    from paceline.models.native.model import NativeModel
    from paceline.models.torch.huggingface import HuggingFaceModel
    from paceline.models.torch.whole_texts import WholeTextModel

    llm = LLM(folder, dtype=dtype, max_batch_size=2, max_model_len=48, num_speculative_tokens=2)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    answers = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        scores = [entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]
        answers.append((list(output.outputs[0].token_ids), scores))
    model = llm.engine.parts.target.model
    kinds = {NativeModel: "kernels", HuggingFaceModel: "transformers", WholeTextModel: "whole texts"}
    return answers, kinds.get(type(model), "torch")


def _difference(wanted: Answers, own: Answers, tolerance: float, *, texts: bool) -> str | None:
    """Return what differs beyond the tolerance; None if nothing does. texts: whether greedy texts must be equal."""
    for (text, scores), (own_text, own_scores) in zip(wanted, own, strict=True):
        worst = max(abs(a - b) for a, b in zip(scores, own_scores, strict=True))
        if not worst <= tolerance:
            return f"a log probability differs by {worst:.2g}"
        if texts and text != own_text:
            return f"the greedy text is {own_text}, transformers' is {text}"
    return None


def _short(error: BaseException) -> str:
    return " ".join(re.sub(r"/\S*/tmp\w+", "the model", str(error)).split())[:300]


def _serve(connection: Connection) -> None:
    warnings.simplefilter("ignore")
    with contextlib.suppress(EOFError):  # the survey has ended
        while True:
            connection.send(tried(connection.recv()))


def survey(types: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Try each type in a process that is replaced when it crashes or exceeds ``LIMIT_S``."""
    context = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, Any]] = {}
    worker: Any = None
    for model_type in types:
        if worker is None:
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
        ours.send(model_type)
        try:
            results[model_type] = ours.recv() if ours.poll(LIMIT_S) else {"state": "untried", "reason": "too slow"}
        except EOFError:
            results[model_type] = {"state": "untried", "reason": "the process ended"}
        if results[model_type].get("reason") in ("too slow", "the process ended"):
            worker.kill()
            worker = None
        print(f"{model_type}: {results[model_type]}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Survey the types and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    import transformers

    results = survey(options.only.split(",") if options.only else model_types())
    print(dict(Counter(result["state"] for result in results.values())))
    if options.output:
        document = {"transformers": transformers.__version__, "vocabulary": VOCABULARY, "types": results}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
