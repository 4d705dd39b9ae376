"""Convert a GGUF model once to a peer's format. Runs inside a peer's environment, not in paceline's.

python export.py huggingface MODEL.gguf DIRECTORY     dequantised bfloat16 safetensors and tokenizer
python export.py openvino HUGGINGFACE_DIRECTORY DIRECTORY     weights in int8, for openvino-genai
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def huggingface(source: Path, target: Path) -> None:
    """GGUF -> a directory that transformers and vLLM load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def openvino(source: Path, target: Path) -> None:
    """Hugging Face directory -> OpenVINO IR with int8 weights, one scale per output channel."""
    from optimum.exporters.openvino.convert import export_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    config = OVWeightQuantizationConfig(bits=8)
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, quantization_config=config)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(target)
    export_tokenizer(tokenizer, target)


FORMATS = {"huggingface": huggingface, "openvino": openvino}


def main() -> None:
    """Export into a partial directory and rename it at the end, so that an existing directory is complete."""
    kind, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    FORMATS[kind](source, partial)
    partial.rename(target)


if __name__ == "__main__":
    main()
