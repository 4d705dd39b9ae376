"""Options of vLLM, transformers, llama.cpp and Ollama, and their equivalents here.

One table for Python and for the command line, which writes dashes: names in ``SAME`` are translated, those in
``ENGINE`` and ``SAMPLING`` are answered with what there is instead.
"""

from __future__ import annotations

from collections.abc import Mapping

SAME: Mapping[str, str] = {
    "max_num_seqs": "max_batch_size",
    "parallel": "max_batch_size",
    "tensor_parallel_size": "tensor_parallel",
    **dict.fromkeys(("ctx_size", "n_ctx", "num_ctx", "context_length", "max_seq_len"), "max_model_len"),
    "speculative_model": "draft_model",
    "assistant_model": "draft_model",
    "model_draft": "draft_model",
    "draft_max": "num_speculative_tokens",
    "enable_prefix_caching": "prefix_cache",
    "torch_dtype": "dtype",
    "device_map": "device",
    **dict.fromkeys(("cache_type_k", "kv_cache_type"), "kv_cache_dtype"),
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict", "predict"), "max_tokens"),
    "min_new_tokens": "min_tokens",
    "temp": "temperature",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "typical": "typical_p",
    "system_prompt": "system",
}
"""Names of options that mean the same here, with the same values: ``LLM`` and all commands take them."""

CACHE_DTYPES: Mapping[str, str] = {
    "q8_0": "int8",
    "f16": "bf16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
}
"""Words of vLLM, llama.cpp and Ollama for the dtype of keys and values, and those here: as many bits."""

_NO_BEAMS = "there is no beam search here; n or best_of with rank_by='logprob' gives the most likely of many samples"
_NO_FEEDBACK = "eta_cutoff or top_n_sigma; mirostat's cut would depend on how surprising the tokens drawn before were"
_ADAPTERS = "adapters={NAME: DIRECTORY} of LLM, --adapter NAME=DIRECTORY of commands"
_SPEED = "nothing to set here: speed is chosen by attention, rounds and num_speculative_tokens"

SAMPLING: Mapping[str, str] = {
    "max_length": "max_tokens, which counts the answer alone",
    "do_sample": "temperature: 0 is greedy",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "logits_processors, or bad_words with texts",
    "suppress_tokens": "logit_bias={token: -100}",
    "no_repeat_ngram_size": "logits_processors, or paceline.transformers.generate",
    **dict.fromkeys(("mirostat", "mirostat_tau", "mirostat_eta", "mirostat_mode"), _NO_FEEDBACK),
    "penalty_alpha": "nothing here: contrastive search ranks candidates by hidden states that draft tokens do not have",
    "repeat_penalty": "repetition_penalty, which counts all tokens of prompt and answer, not the last 64",
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
    "detokenize": "an LLM of token ids alone: a loaded model without a tokenizer",
    "spaces_between_special_tokens": "nothing to set here: texts are spelled as their tokens are",
    "truncate_prompt_tokens": "the prompt itself: cut its token ids",
    "output_kind": "LLM.stream, which yields answers as they grow",
    "echo": "RequestOutput.prompt beside prompt_logprobs",
    **dict.fromkeys(
        ("use_beam_search", "num_beams", "beam_width", "num_beam_groups", "length_penalty", "early_stopping"), _NO_BEAMS
    ),
}

ENGINE: Mapping[str, str] = {
    "max_num_batched_tokens": "prefill_chunk",
    "speculative_config": "draft_model, drafter and num_speculative_tokens",
    "enable_lora": _ADAPTERS,
    "lora_modules": _ADAPTERS,
    "n_gpu_layers": "device: a model lies on one device as a whole",
    "hf_repo": "the model's name: ORG/NAME",
    "model": "the model's name as the first argument",
    "gpu_memory_utilization": "memory_limit, in bytes",
    "kv_cache_memory_bytes": "memory_limit",
    "enable_chunked_prefill": "prefill_chunk and longest_pause",
    "enforce_eager": "rounds='host'",
    "attention_backend": "attention",
    "load_in_8bit": "quantization='int8'",
    "load_in_4bit": "quantization='int4'",
    "seed": "SamplingParams(seed=...), of each request",
    "revision": "the model's name: 'ORG/NAME@REVISION'",
    "tokenizer_revision": "the tokenizer's name: 'ORG/NAME@REVISION'",
    "trust_remote_code": "nothing here: code that comes with a model is never run",
    "pipeline_parallel_size": "tensor_parallel: layers are not divided among devices here",
    "cache_type_v": "kv_cache_dtype alone, which is of keys and values",
    "swap_space": "nothing here: rows wait where memory ends",
    "disable_log_stats": "nothing to set here: an LLM logs no figures",
    "num_beams": _NO_BEAMS,
    **dict.fromkeys(("compilation_config", "cuda_graph_sizes", "block_size"), _SPEED),
}
