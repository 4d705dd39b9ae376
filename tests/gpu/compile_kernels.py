"""Compile every kernel for sm_90 without a GPU; run by test_compile.py in a process that does not interpret kernels.

Prints a line for each kernel; the first that fails raises. With --few, one or two shapes of each kernel.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FEW = "--few" in sys.argv
TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"bf16": "*bf16", "fp32": "*fp32", "fp16": "*fp16"}
ALIGNED = ("_stride", "_row", "_head", "_token", "_position", "inputs", "outputs")  # of real models: multiples of 16


def compile_kernel(kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """signature: types of the runtime arguments; every other argument must be in ``constants``."""
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in signature if signature[name].startswith("*") or name.endswith(ALIGNED)]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=places, attrs=hints)
    return triton.compile(source, target=TARGET, options=options)


TYPES = {
    "positions": "*i64", "tree": "*i8", "partial": "*fp32", "levels": "*fp32", "scale": "fp32",
    "logits": "*fp32", "p_logits": "*fp32", "q_logits": "*fp32", "maxima": "*fp32", "masses": "*fp32",
    "p_maxima": "*fp32", "q_maxima": "*fp32", "p_masses": "*fp32", "q_masses": "*fp32",
    "leaders": "*i32", "p_leaders": "*i32", "q_leaders": "*i32", "ids": "*i64", "temperature": "*fp32",
    "seed": "*i64", "length": "*i64", "values": "*fp64", "tokens": "*i32", "drawn": "*i32", "guesses": "*i64",
    "counts": "*i64", "text": "*i64", "prompt_length": "*i64", "limit": "*i64", "stops": "*i64", "live": "*i64",
    "record": "*i64", "accepted": "*i64", "rate": "fp32", "scales": "*fp32", "tickets": "*i32", "cosine": "*fp32",
    "own": "*fp32", "seen": "*fp32", "presence": "*fp32", "frequency": "*fp32",
    "repetition": "*fp32", "min_length": "*i64", "floors": "*fp32", "top_k": "*i64", "top_p": "*fp32",
    "frequencies": "*fp32", "amplitude": "fp32", "epsilon": "fp32",
}  # fmt: skip
BLOCKS = {"BLOCKS": 32, "BLOCKS_UP": 32}
ROW = {"LENGTH": 8, "LENGTH_UP": 8, "STOPS": 4, "STOPS_UP": 4}


def arguments(kernel: Any, constants: dict[str, Any], **types: str) -> dict[str, str]:
    """Each runtime argument's type: as said, by its name, or a number."""
    names = [name for name in kernel.arg_names if name not in constants]
    return {name: types.get(name, TYPES.get(name, "i32")) for name in names}


def build(kernel: Any, constants: dict[str, Any], *, warps: int = 4, stages: int = 2, **types: str) -> Any:
    return compile_kernel(kernel, arguments(kernel, constants, **types), constants, num_warps=warps, num_stages=stages)


def attention() -> dict[str, Any]:
    from paceline.attention.ragged import attend_kernel, join_kernel

    found: dict[str, Any] = {}
    shapes = [  # head width, tile, shared heads, stretch, window, tree
        (128, 16, 1, 0, False, "none"),
        (128, 32, 4, 0, False, "none"),
        (128, 64, 4, 256, True, "none"),
        (64, 16, 4, 0, True, "ancestors"),
        (64, 16, 4, 256, True, "paths"),
    ]
    cases = [(POINTERS["bf16"], shape) for shape in shapes] + [
        (POINTERS[other], shapes[1]) for other in ("fp32", "fp16")
    ]
    if FEW:
        cases = [cases[1], cases[4]]
    for element, (dim, tile, shared, split, window, tree) in cases:
        constants = {
            "GROUPS": 8, "SHARED": shared, "DIM": dim, "BLOCK_M": tile, "BLOCK_N": 64,
            "BLOCK_D": dim, "SPLIT_SIZE": split, "WINDOWED": window, "TREE": tree,
            "HEAD_TILES": 1,
        }  # fmt: skip
        key = f"attend {element} D={dim} tile={tile} tree={tree}"
        of_tree = "*i32" if tree == "paths" else "*i8"
        found[key] = build(attend_kernel, constants, q=element, k=element, v=element, tree=of_tree)
        constants = {"DIM": dim, "BLOCK_D": dim, "BLOCK_S": 16}
        found[f"join {element} D={dim}"] = build(join_kernel, constants, warps=1, out=element)
    return found


def drawing() -> dict[str, Any]:
    from paceline.gpu import draw

    cut = dict(LENGTH=8, BLOCK=draw.BLOCK, **BLOCKS)
    return {
        "leader": build(draw.leader_kernel, {"BLOCKS": 32, "BLOCK": draw.BLOCK}, warps=8),
        "leader bf16": build(draw.leader_kernel, {"BLOCKS": 32, "BLOCK": draw.BLOCK}, warps=8, logits="*bf16"),
        "draw": build(draw.draw_kernel, cut | {"CUT": False}, warps=8),
        "draw cut": build(draw.draw_kernel, cut | {"CUT": True}, warps=8),
        "pick": build(draw.pick_kernel, BLOCKS, warps=1, out="*i64"),
    }


def accepting() -> dict[str, Any]:
    from paceline.gpu import accept
    from paceline.gpu.draw import BLOCK

    wide = {"LENGTH": 8, "BLOCK": BLOCK, **BLOCKS}
    return {
        "coupled": build(accept.coupled_kernel, {"SYNTHETIC": False, **BLOCKS, **ROW}),
        "coupled synthetic": build(accept.coupled_kernel, {"SYNTHETIC": True, **BLOCKS, **ROW}),
        "mass": build(accept.mass_kernel, wide, warps=8),
        "judge": build(accept.judge_kernel, {"LENGTH": 8, "LENGTH_UP": 8, **BLOCKS}),
        "recover": build(accept.recover_kernel, wide, warps=8),
        "finish": build(accept.finish_kernel, {**BLOCKS, **ROW}),
        "logprob": build(accept.logprob_kernel, {"RECORD": 11, "LENGTH": 8, "LENGTH_UP": 8, **BLOCKS}),
    }


def shaping() -> dict[str, Any]:
    from paceline.gpu import shape
    from paceline.gpu.draw import BLOCK

    adjust = {"LENGTH": 8, "STOPS": 8, "BLOCK": BLOCK}
    found = {"adjust": build(shape.adjust_kernel, adjust, warps=8, out="*fp32", counts="*fp32")}
    for element in list(POINTERS.values())[: 1 if FEW else None]:
        types = {"logits": element, "out": "*fp32"}
        found[f"cut {element}"] = build(shape.cut_kernel, {"LENGTH": 8, "BLOCK": BLOCK, **BLOCKS}, warps=8, **types)
    return found


def linears() -> dict[str, Any]:
    from paceline.gpu.linear import CANDIDATES, linear_kernel

    found = {}
    cases = [("*i8", "*bf16"), ("*fp8e4nv", "*bf16"), ("*bf16", "*bf16")]
    if not FEW:
        cases += [("*i8", "*fp16"), ("*fp8e4nv", "*fp16"), ("*fp16", "*fp16")]
    for weight, element in cases:
        for tile in CANDIDATES if (weight, element) == ("*i8", "*bf16") and not FEW else CANDIDATES[:1]:
            for parts, block_m in ((1, 16), (4, 64))[FEW:]:
                constants = {
                    "SCALED": weight != element, "BIASED": False, "PARTS": parts,
                    "BLOCK_M": block_m, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs,
                }  # fmt: skip
                types = {"x": element, "out": element, "bias": element, "weight": weight}
                key = f"linear {weight} {element} {tile.outputs}x{tile.inputs} rows={block_m} parts={parts}"
                found[key] = build(linear_kernel, constants, warps=tile.warps, stages=tile.stages, **types)
    return found


def rotary() -> dict[str, Any]:
    from paceline.gpu.rotary import rotary_kernel

    shape = {"HEADS": 32, "GROUPS": 8, "DIM": 128, "BLOCK_D": 128, "BLOCK_H": 8}
    found = {}
    for element in list(POINTERS.values())[: 1 if FEW else None]:
        types = dict.fromkeys(("qkv", "cosine", "sine", "norm", "out", "keys", "values"), element)
        for turned, normed in ((True, True), (True, False), (False, False)):
            key = f"rotary {element} turned={turned} normed={normed}"
            found[key] = build(rotary_kernel, shape | {"TURNED": turned, "NORMED": normed}, **types)
    return found


FAMILIES = [attention, drawing, accepting, shaping, linears, rotary]


def main() -> None:
    for family in FAMILIES:
        for name, compiled in family().items():
            print(f"{name}: {compiled.metadata.shared} bytes shared, {len(compiled.asm['cubin'])} bytes cubin")


if __name__ == "__main__":
    main()
