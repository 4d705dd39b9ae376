"""GGUF files for tests: encoders of types that the gguf package cannot write, and copies of files in other types.

``python gguf_support.py SOURCE TARGET TYPE`` writes a copy with all matrices in a type, or in one of ``MIXTURES``.
With LLAMA_CPP=PATH, the path of a library that has llama.cpp's functions (such as xllamacpp's), those encode.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
KindOf = Callable[[str], GGMLQuantizationType]


def begun(path: Path, architecture: str, config: Any, more_layers: int = 0) -> gguf.GGUFWriter:
    """Begin a file with the sizes that all architectures have. more_layers: of heads, behind the model's own."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers + more_layers)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size") or hasattr(config, "n_inner"):
        inner = getattr(config, "intermediate_size", None) or config.n_inner or 4 * config.hidden_size
        writer.add_feed_forward_length(inner)
    heads = config.num_attention_heads
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        epsilons = (
            getattr(config, name, None) for name in ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
        )
        writer.add_layer_norm_eps(next((epsilon for epsilon in epsilons if epsilon is not None), 1e-5))
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(values: Floats, kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """Encode numbers [rows, width] in a type."""
    if library := os.environ.get("LLAMA_CPP"):
        return _by_llama_cpp(ctypes.CDLL(library), np.ascontiguousarray(values, np.float32), kind)
    own = {GGMLQuantizationType.Q4_K: _q4_k, GGMLQuantizationType.Q6_K: _q6_k}.get(kind)
    if own is None:
        return gguf.quantize(np.ascontiguousarray(values, np.float32), kind)
    return own(values.reshape(-1, 256).astype(np.float32)).reshape(len(values), -1)


def _by_llama_cpp(library: ctypes.CDLL, values: Floats, kind: GGMLQuantizationType) -> Bytes:
    rows, width = values.shape
    block, size = GGML_QUANT_SIZES[kind]
    encoded = np.zeros((rows, width // block * size), np.uint8)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    sizes = ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(width)
    where = ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(encoded.ctypes.data)
    assert library.ggml_quantize_chunk(ctypes.c_int(kind), *where, *sizes, None) == encoded.nbytes
    return encoded


def random_blocks(kind: GGMLQuantizationType, rows: int, blocks: int, seed: int = 0) -> Bytes:
    """Return random bytes [rows, bytes] of a type whose numbers are all finite.

    Random bytes have infinite scales now and then, so blocks with them are replaced by another block.
    """
    size = GGML_QUANT_SIZES[kind][1]
    made = np.random.default_rng(seed).integers(0, 256, (8 * rows * blocks, size), np.uint8)
    with np.errstate(all="ignore"):
        numbers = gguf.dequantize(made, kind)
        good = made[np.isfinite(numbers).all(axis=1) & (np.abs(numbers).max(axis=1) < 1e3)]
    assert len(good) >= rows * blocks
    return good[: rows * blocks].reshape(rows, blocks * size)


def _halves(numbers: Floats) -> Bytes:
    return np.ascontiguousarray(numbers.astype(np.float16)).view(np.uint8).reshape(len(numbers), 2)


def _divided(numbers: Floats, by: Floats) -> Floats:
    return np.divide(numbers, by, out=np.zeros_like(numbers), where=by != 0)


def _q4_k(blocks: Floats) -> Bytes:
    """Values [N, 256] -> Q4_K: the best of several scales for each group of 32, its minimum at most 0."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    scale = _best_scale(groups, low)
    step = (scale.max(axis=1) / 63).astype(np.float16).astype(np.float32)
    least = ((-low).max(axis=1) / 63).astype(np.float16).astype(np.float32)
    scales = _divided(scale, np.broadcast_to(step[:, None], scale.shape)).round().clip(0, 63).astype(np.uint8)
    minima = _divided(-low, np.broadcast_to(least[:, None], low.shape)).round().clip(0, 63).astype(np.uint8)
    width, bottom = (step[:, None] * scales)[:, :, None], (least[:, None] * minima)[:, :, None]
    codes = _divided(groups + bottom, np.broadcast_to(width, groups.shape)).round().clip(0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    packed = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([_halves(step), _halves(least), _six_bits(scales, minima), packed], axis=1)


def _best_scale(groups: Floats, low: Floats) -> Floats:
    span = groups.max(axis=2) - low
    best, chosen = np.full(span.shape, np.inf, np.float32), span / 15
    for steps in np.arange(13.0, 17.0, 0.25, dtype=np.float32):
        scale = (span / steps)[:, :, None]
        shifted = groups - low[:, :, None]
        codes = _divided(shifted, np.broadcast_to(scale, groups.shape)).round().clip(0, 15)
        error = ((codes * scale - shifted) ** 2).sum(axis=2)
        best, chosen = np.where(error < best, error, best), np.where(error < best, scale[:, :, 0], chosen)
    return chosen


def _six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    low = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
    middle = (minima[:, :4] & 63) | (minima[:, 4:] >> 4 << 6)
    high = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate([low, middle, high], axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    """Values [N, 256] -> Q6_K: a signed 8-bit scale for each group of 16."""
    groups = blocks.reshape(-1, 16, 16)
    at = np.abs(groups).argmax(axis=2)[:, :, None]
    scale = np.take_along_axis(groups, at, axis=2)[:, :, 0] / -32
    step = (np.abs(scale).max(axis=1) / 127).astype(np.float16).astype(np.float32)
    scales = _divided(scale, np.broadcast_to(step[:, None], scale.shape)).round().clip(-127, 127).astype(np.int8)
    width = (step[:, None] * scales.astype(np.float32))[:, :, None]
    codes = (_divided(groups, np.broadcast_to(width, groups.shape)).round().clip(-32, 31) + 32).astype(np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)  # values 0..31, 32..63, 64..95, 96..127 of each half
    low = np.concatenate([(quarters[:, :, n] & 15) | ((quarters[:, :, n + 2] & 15) << 4) for n in (0, 1)], axis=2)
    high = sum((quarters[:, :, n] >> 4) << (2 * n) for n in range(4))
    flat = [low.reshape(-1, 128), np.asarray(high, np.uint8).reshape(-1, 64), scales.view(np.uint8)]
    return np.concatenate([*flat, _halves(step)], axis=1)


def copy(source: Path, target: Path, kind_of: KindOf, tensors_per_part: int = 0) -> None:
    """Copy a GGUF file with its matrices in other types. tensors_per_part: split the copy; 0: one file."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch, split_max_tensors=tensors_per_part)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "split.", "general.architecture")):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        to = kind_of(tensor.name) if values.ndim == 2 else GGMLQuantizationType.F32
        if values.shape[-1] % GGML_QUANT_SIZES[to][0]:
            to = _FALLBACKS.get(to, GGMLQuantizationType.Q8_0)
        writer.add_tensor(tensor.name, encode(values, to) if values.ndim == 2 else values, raw_dtype=to)
    finish(writer)


_Q = GGMLQuantizationType
# llama.cpp's types for rows that are no multiple of 256 numbers
_FALLBACKS = {_Q.Q2_K: _Q.IQ4_NL, _Q.Q3_K: _Q.IQ4_NL, _Q.Q4_K: _Q.Q5_0, _Q.Q5_K: _Q.Q5_1}
# llama.cpp's mixtures without an importance matrix: the type of most matrices, and those of others. The head, or the
# embedding in place of it, is Q6_K; in Q4_K_M half of the layers have v and down in Q6_K, too.
MIXTURES: dict[str, tuple[GGMLQuantizationType, dict[str, GGMLQuantizationType]]] = {
    "Q4_K_M": (_Q.Q4_K, {}),
    "Q3_K_M": (_Q.Q3_K, {"attn_v": _Q.Q4_K, "ffn_down": _Q.Q4_K, "attn_output": _Q.Q4_K}),
    "Q2_K": (_Q.Q2_K, {"attn_v": _Q.Q4_K, "ffn_down": _Q.Q3_K, "attn_output": _Q.Q3_K}),
}


def in_mixture(mixture: str, layers: int, *, tied: bool = False) -> KindOf:
    """Return the choice of types of a mixture. tied: whether the file has no output head. Q2_K: of 4 queries a key."""
    usual, others = MIXTURES[mixture]

    def kind_of(name: str) -> GGMLQuantizationType:
        parts = name.split(".")
        if parts[0] == ("token_embd" if tied else "output"):
            return _Q.Q6_K
        if parts[0] != "blk":
            return usual
        part, at = parts[2], int(parts[1])
        if mixture == "Q4_K_M" and part in ("attn_v", "ffn_down"):
            more_bits = at < layers // 8 or at >= 7 * layers // 8 or (at - layers // 8) % 3 == 2
            return _Q.Q6_K if more_bits else usual
        if mixture == "Q3_K_M" and ((part == "attn_v" and at < 2) or (part == "ffn_down" and at < layers // 16)):
            return _Q.Q5_K
        return others.get(part, usual)

    return kind_of


def main(source: Path, target: Path, kind: str) -> None:
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    layers, names = int(reader.fields[f"{arch}.block_count"].contents()), {each.name for each in reader.tensors}
    mixed = in_mixture(kind, layers, tied="output.weight" not in names) if kind in MIXTURES else None
    copy(source, target, mixed or (lambda _: GGMLQuantizationType[kind]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
