"""Compile every kernel without a GPU; run by test_compile.py in a process that does not interpret kernels.

    export TRITON_INTERPRET=0
    cd tests/kernels/gpu
    python compile_kernels.py --all --arch 80,89,90,100 --table ../../../docs/gpu-kernels.md --codes compiled.txt

Prints a line for each kernel, its registers, bytes spilled and bytes of shared memory; the first that fails raises, as
does one that needs more shared memory than a program may have. With --few, one or two shapes of each kernel: the first
with given types of arguments is compiled to the end, the others by Triton's front end alone, as are those whose code is
in compiled.txt, the hashes of all kernels for sm_90 when the table was written. With --families and names of them,
their kernels, whose lines a table then gets anew. Kernels and counts are kept in Triton's cache
(``TRITON_CACHE_DIR``), so that a run which was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

LARGEST_SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of a program, by architecture
FEW, ARCH = False, 90
EXIT = re.compile(r"^0x[0-9a-f]{5}94d 0x", re.MULTILINE)  # the instruction's code, in a line of four words
COMPILED: set[tuple[object, ...]] = set()  # architectures, kernels and types of their arguments
CODES: set[str] = set()  # of the kernels for sm_90 that this process has compiled
POINTERS = {"bf16": "*bf16", "fp32": "*fp32", "fp16": "*fp16"}
ALIGNED = ("_stride", "_row", "_head", "_token", "_position", "inputs", "outputs")  # of real models: multiples of 16


@dataclass(frozen=True)
class Used:
    """Per thread: registers, and spilled bytes; per program: bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compile_kernel(kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: Any) -> Used | None:
    """signature: types of the runtime arguments; every other argument must be in ``constants``."""
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in signature if signature[name].startswith("*") or name.endswith(ALIGNED)]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=places, attrs=hints)
    target, key = GPUTarget("cuda", ARCH, 32), (ARCH, kernel.fn.__name__, *types.values())
    code = code_of(source, target, options)
    if FEW and (key in COMPILED or code in compiled_before()):
        return None
    COMPILED.add(key)
    if ARCH == 90:
        CODES.add(code)
    compiled = triton.compile(source, target=target, options=options)
    kept = Path(triton.knobs.cache.dir, f"{compiled.metadata.hash}.used.json")
    if not kept.exists():
        kept.write_text(json.dumps(asdict(count(compiled))))
    return Used(**json.loads(kept.read_text()))


@cache
def compiled_before() -> frozenset[str]:
    return frozenset(Path(__file__).with_name("compiled.txt").read_text().split())


def code_of(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> str:
    """Hash of all that the compiler gets: a kernel as Triton's front end gives it, and options; and of its version.

    Raises the errors that Triton finds before it optimises: of names, types and shapes.
    """
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    functions = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, *functions, context)
    text = f"{triton.__version__} {target} {sorted(options.items())} {module.str_nodebug()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def count(compiled: Any) -> Used:
    """Count what a compiled kernel uses, and check its instructions."""
    shared = int(compiled.metadata.shared)
    assert shared <= LARGEST_SHARED[ARCH], f"{shared} bytes of shared memory, {LARGEST_SHARED[ARCH]} there are"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        dump = printed(triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-elf", file.name)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", dump)
        assert usage, dump
        assert EXIT.search(dump), "the compiler has made nothing but a trap of it"
        registers, stack = map(int, usage.groups())
        if stack == 0 and "wgmma" not in compiled.asm["ptx"]:  # the disassembler takes 0.3 s to start
            return Used(registers, 0, shared)
        code = printed(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    assert (spoilt := overwritten_operands(code)) == [], f"written while a product may still read it: {spoilt}"
    return Used(registers, spilled_bytes(code), shared)


def printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def spilled_bytes(code: str) -> int:
    """Bytes that the instructions store in a thread's local memory, which kernels use for nothing else."""
    stores = re.findall(r"\bSTL(?:\.(64|128))?[. ]", code)
    return sum(int(bits or 32) // 8 for bits in stores)


def overwritten_operands(code: str) -> list[str]:
    """The instructions of sm_90 that write a register which a product may still be read from.

    HGMMA reads its left operand, if that is in registers, while later instructions run, up to ``WARPGROUP.DEPBAR``.
    Loops are followed once.
    """
    lines = re.findall(r"^\s*(\.L_x_\d+):|^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", code, re.MULTILINE)
    labels = {label: place for place, (label, _) in enumerate(lines) if label}
    place, taken, read, found = 0, set[int](), set[int](), []
    while place < len(lines):
        instruction = re.sub(r"^@!?U?P\w+ ", "", lines[place][1])
        written = re.match(r"(\S+) +R(\d+)", instruction)
        branch = re.match(r"BRA `\((\.L_x_\d+)\)", instruction)
        if instruction.startswith("WARPGROUP.DEPBAR"):
            read = set()
        elif left := re.match(r"HGMMA\S* R\d+, R(\d+),", instruction):
            read |= {int(left[1]) + offset for offset in range(4)}
        elif written and not instruction.startswith("HGMMA"):
            count = _registers_written(written[1])
            found += [instruction] * bool(read & set(range(int(written[2]), int(written[2]) + count)))
        elif branch and labels.get(branch[1], place) < place and place not in taken:
            taken.add(place)
            place = labels[branch[1]]
        place += 1
    return found


def _registers_written(operation: str) -> int:
    if ".128" in operation or ".M88.4" in operation:
        return 4
    return 2 if ".64" in operation or ".WIDE" in operation or ".M88.2" in operation else 1


TYPES = {
    "positions": "*i64", "slots": "*i64", "cache_rows": "*i64", "pages": "*i32", "tree": "*i8", "partial": "*fp32",
    "levels": "*fp32", "scale": "fp32", "k_scales": "*fp32", "v_scales": "*fp32",
    "logits": "*fp32", "p_logits": "*fp32", "q_logits": "*fp32", "maxima": "*fp32", "masses": "*fp32",
    "p_maxima": "*fp32", "q_maxima": "*fp32", "p_masses": "*fp32", "q_masses": "*fp32",
    "argmaxes": "*i32", "p_argmaxes": "*i32", "q_argmaxes": "*i32", "ids": "*i64", "temperatures": "*fp32",
    "seed": "*i64", "length": "*i64", "values": "*fp64", "tokens": "*i32", "drawn": "*i32", "draft_tokens": "*i64",
    "counts": "*i64", "text": "*i64", "prompt_length": "*i64", "limit": "*i64", "stops": "*i64", "live": "*i64",
    "record": "*i64", "accepted": "*i64", "rate": "fp32", "scales": "*fp32", "tickets": "*i32", "cosine": "*fp32",
    "start": "*i64", "applied": "*i64", "certain": "*i64", "paths": "*i32",
    "own": "*fp32", "seen": "*fp32", "presence": "*fp32", "frequency": "*fp32",
    "repetition": "*fp32", "min_length": "*i64", "floors": "*fp32", "top_k": "*i64", "top_p": "*fp32",
    "frequencies": "*fp32", "amplitude": "fp32", "epsilon": "fp32",
}  # fmt: skip
BLOCKS = {"BLOCKS": 32, "BLOCKS_UP": 32}
ROW = {"LENGTH_UP": 8, "STOPS": 4, "STOPS_UP": 4}


def arguments(kernel: Any, constants: dict[str, Any], **types: str) -> dict[str, str]:
    """Each runtime argument's type: given, by its name, or a number."""
    names = [name for name in kernel.arg_names if name not in constants]
    return {name: types.get(name, TYPES.get(name, "i32")) for name in names}


def build(
    kernel: Any,
    constants: dict[str, Any],
    *,
    warps: int = 4,
    stages: int = 2,
    fusion: bool = True,
    most: int | None = None,
    **types: str,
) -> Used | None:
    signature = arguments(kernel, constants, **types)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion, "maxnreg": most}
    return compile_kernel(kernel, signature, constants, **options)


def attention() -> dict[str, Used | None]:
    from paceline.core.eight_bits import SCALE_BYTES
    from paceline.core.pages import PAGE_POSITIONS
    from paceline.kernels.attention.ragged import Tiles, attend_kernel, join_kernel, join_warps, largest_tile

    found: dict[str, Used | None] = {}
    shapes = [  # head width, tile, shared heads, stretch, window, tree
        (128, 16, 1, 0, False, "none"),
        (128, 32, 4, 0, False, "none"),
        (128, 64, 4, 256, True, "none"),
        (64, 16, 4, 0, True, "ancestors"),
        (64, 16, 4, 256, True, "paths"),
        (256, 16, 4, 0, False, "none"),
        (256, largest_tile(256), 4, 0, False, "ancestors"),
        (512, largest_tile(512), 8, 0, False, "none"),
    ]
    cases = [("*bf16", "*bf16", PAGE_POSITIONS, shape) for shape in shapes]
    cases += [("*bf16", "*bf16", 0, shapes[1])]  # of heads, and of ranks that share a model
    cases += [("*fp32", "*fp32", PAGE_POSITIONS, shapes[0]), ("*fp16", "*fp16", PAGE_POSITIONS, shapes[1])]
    cases += [("*bf16", "*i8", PAGE_POSITIONS, shapes[1])]
    cases += [("*bf16", "*fp8e4nv", PAGE_POSITIONS, shapes[1])] if ARCH >= 89 else []
    if FEW:
        cases = [cases[1], cases[4], ("*bf16", "*i8", PAGE_POSITIONS, shapes[1])]
    for element, cached, page, (dim, tile, shared, split, window, tree) in cases:
        width = dim if cached == element else dim + SCALE_BYTES
        constants = {
            "GROUPS": 8, "SHARED": shared, "DIM": dim, "VALUE_DIM": dim, "BLOCK_M": tile, "BLOCK_N": 64,
            "K_POSITION": width if page else 0, "V_POSITION": width if page else 0,
            "BLOCK_D": dim, "BLOCK_V": dim, "SPLIT_SIZE": split, "WINDOWED": window, "TREE": tree,
            "HEAD_TILES": 1, "IDLE_ROWS": tree == "none", "CAPPED": False, "SINKS": False,
            "SCALED": cached != element, "PAGE": page,
        }  # fmt: skip
        tiles, size = Tiles(), 4 if element == "*fp32" else 2
        key = f"attend {element} D={dim} tile={tile} tree={tree}" + (f" cache={cached}" if cached != element else "")
        key += "" if page else " side by side"
        of_tree = "*i32" if tree == "paths" else "*i8"
        found[key] = build(
            attend_kernel, constants, warps=tiles.warps_for(tile, dim), stages=tiles.stages_for(dim, size),
            tree=of_tree, sinks="*fp32", cap="fp32", q=element, k=cached, v=cached, out=element,
        )  # fmt: skip
        constants = {"HEADS": 8, "SINKS": False, "DIM": dim, "BLOCK_D": dim, "BLOCK_S": 16}
        join = build(join_kernel, constants, warps=join_warps(dim), out=element, sinks="*fp32")
        found[f"join {element} D={dim}"] = join
    return found


def drawing() -> dict[str, Used | None]:
    from paceline.kernels.gpu import draw

    cut = dict(BLOCK=draw.BLOCK, **BLOCKS)
    return {
        "leader": build(draw.block_maxima_kernel, {"BLOCKS": 32, "BLOCK": draw.BLOCK}, warps=8),
        "leader bf16": build(draw.block_maxima_kernel, {"BLOCKS": 32, "BLOCK": draw.BLOCK}, warps=8, logits="*bf16"),
        "draw": build(draw.draw_kernel, cut | {"CUT": False}, warps=8),
        "draw cut": build(draw.draw_kernel, cut | {"CUT": True}, warps=8),
        "pick": build(draw.pick_kernel, BLOCKS, warps=1, out="*i64"),
    }


def searching() -> dict[str, Used | None]:
    from paceline.kernels.gpu.search import _BLOCK, _WARPS, match_kernel

    constants = {"SUFFIX": 8, "BLOCK": _BLOCK, "SEPARATES": -1, "IDLE_ROWS": True}
    types = dict.fromkeys(("table", "size", "suffix", "place", "matched"), "*i64")
    return {"match": build(match_kernel, constants, warps=_WARPS, **types)}


def accepting() -> dict[str, Used | None]:
    from paceline.kernels.gpu import accept
    from paceline.kernels.gpu.draw import BLOCK

    wide = {"BLOCK": BLOCK, **BLOCKS}
    return {
        "coupled": build(accept.coupled_kernel, {"SYNTHETIC": False, **BLOCKS, **ROW}),
        "coupled synthetic": build(accept.coupled_kernel, {"SYNTHETIC": True, **BLOCKS, **ROW}),
        "mass": build(accept.mass_kernel, wide, warps=8),
        "judge": build(accept.rejection_kernel, {"LENGTH_UP": 8, **BLOCKS}),
        "recover": build(accept.recover_kernel, wide, warps=8),
        "finish": build(accept.finish_kernel, {**BLOCKS, **ROW}),
        "logprob": build(accept.logprob_kernel, {"LENGTH_UP": 8, **BLOCKS}),
    }


def shaping() -> dict[str, Used | None]:
    from paceline.core.truncation import WEIGHTLESS, WIDEST
    from paceline.kernels.gpu import cut, shape
    from paceline.kernels.gpu.draw import BLOCK

    numbers = {"lines": "*i64", "bits": "*i32", "keys": "*i32", "bounds": "*i32", "edges": "*i32"}
    numbers |= {"tallies": "*i64", "tops": "*fp32", "centres": "*fp32", "radii": "*i32", "depths": "*fp32"}
    bins, columns, chunk = {"BINS": cut.BINS}, {"COLUMNS": cut.COLUMNS}, {"CHUNK": cut.CHUNK}
    options: dict[str, Any] = {"warps": 8, "fusion": False, "brackets": "*i64"} | numbers
    found = {
        "adjust": build(shape.adjust_kernel, {"STOPS": 8, "BLOCK": BLOCK}, out="*fp32", counts="*fp32", **options),
        "cut, bounds": build(cut.bounds_kernel, BLOCKS | bins, **options | {"warps": 1}),
    }
    for name, kind in (("cut", {"CENTRED": False}), ("typical", {"CENTRED": True}))[: 1 if FEW else None]:
        found[f"{name}, bracket"] = build(cut.bracket_kernel, BLOCKS | bins | columns | kind, **options | {"warps": 1})
        found[f"{name}, edge"] = build(cut.edge_kernel, {"WAYS": cut.WAYS} | columns | chunk | kind, **options)
    for element in list(POINTERS.values())[: 1 if FEW else None]:
        types, block = options | {"logits": element, "out": "*fp32"}, {"BLOCK": BLOCK}
        for name, kind in (("cut", {"CENTRED": False}), ("typical", {"CENTRED": True}))[: 1 if FEW else None]:
            tally, collect = {"BLOCKS": 32} | block | chunk | bins | kind, block | columns | kind
            found[f"{name}, tally {element}"] = build(cut.tally_kernel, tally, **types)
            found[f"{name}, collect {element}"] = build(cut.collect_kernel, collect, **types)
        lines = {"BLOCKS": 32} | block
        limits = {"WEIGHTLESS": WEIGHTLESS, "WIDEST": WIDEST}
        found[f"moments {element}"] = build(cut.moments_kernel, lines | limits, moments="*i64", **types)
        found[f"truncate {element}"] = build(cut.truncate_kernel, lines | {"LEAST": False}, **types)
        found[f"cut {element}"] = build(cut.cut_kernel, block, **types)
        found[f"mask {element}"] = build(shape.mask_kernel, {"WIDTH": 17} | block, **types | {"fusion": True})
    return found


def linears() -> dict[str, Used | None]:
    from paceline.kernels.gpu.linear import CANDIDATES, NO_GROUPS, linear_kernel, most_registers, widen_kernel

    found = {}
    cases = [("*i16", "*bf16"), ("*fp8e4nv", "*bf16"), ("*bf16", "*bf16")]
    if not FEW:
        cases += [("*i16", "*fp16"), ("*fp8e4nv", "*fp16"), ("*fp16", "*fp16")]
    for weight, element in cases:
        if weight == "*fp8e4nv" and ARCH < 89:
            continue
        for candidate in CANDIDATES if element == "*bf16" and not FEW else CANDIDATES[:1]:
            for split, block_m in ((False, 16), (False, 64), (False, 128), (True, 64))[3 * FEW :]:
                tile = candidate.fitted(block_m, 1 + (weight == element), 2, LARGEST_SHARED[ARCH])
                constants = {
                    "SCALED": weight != element, "BIASED": False, "SPLIT": split,
                    "BLOCK_M": block_m, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs,
                    "WIDENING": element[1:] if weight == "*i16" else "single", "MAJOR": ARCH // 10, **NO_GROUPS,
                }  # fmt: skip
                types = {"x": element, "out": element, "bias": element, "weight": weight}
                name = "pairs of int8" if weight == "*i16" else weight
                key = f"linear {name} {element} {candidate.outputs}x{candidate.inputs} rows={block_m} split={split}"
                options = {"warps": tile.warps, "stages": tile.stages, "most": most_registers(ARCH // 10)}
                found[key] = build(linear_kernel, constants, **options, **types)
        if weight != element:
            name = "pairs of int8" if weight == "*i16" else weight
            shape = {"PAIRED": weight == "*i16", "SCALED": element == "*fp16", "GROUP": 0, "BLOCK": 1024}
            found[f"widen {name} {element}"] = build(widen_kernel, shape, weight=weight, out=element)
    return found


def four_bits() -> dict[str, Used | None]:
    """Products of 4-bit weights: kinds of weights (grid, group, lows), tiles, and rows of a tile."""
    from paceline.kernels.gpu.four_bit_kernels import widen_four_bit_kernel
    from paceline.kernels.gpu.linear import FOUR_BIT_CANDIDATES, linear_kernel, most_registers

    kinds = [("int4", 32, True), ("int4", 128, False), ("fp4", 32, False)]
    cases = [(kind, FOUR_BIT_CANDIDATES[0], "*bf16", rows) for kind in kinds for rows in (16, 64)]
    cases += [(kinds[0], tile, "*bf16", 16) for tile in FOUR_BIT_CANDIDATES[1:]]
    cases += [(kind, FOUR_BIT_CANDIDATES[0], "*fp16", 16) for kind in kinds]
    found = {}
    for (grid, group, shifted), candidate, element, block_m in [cases[0], cases[4]] if FEW else cases:
        tile = candidate.of_runs(block_m, 2, LARGEST_SHARED[ARCH])
        kind = {"GRID": grid, "GROUP": group, "SHIFTED": shifted}
        constants = kind | {
            "SCALED": False, "BIASED": False, "SPLIT": block_m == 16, "WIDENING": element[1:], "MAJOR": ARCH // 10,
            "BLOCK_M": block_m, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs,
        }  # fmt: skip
        types = {"x": element, "out": element, "bias": element, "weight": "*i16", "lows": "*fp16"}
        types["scales"] = "*u8" if grid == "fp4" else "*fp16"
        options = {"warps": tile.warps, "stages": tile.stages, "most": most_registers(ARCH // 10)}
        name = f"{grid} by {group}{' with lows' * shifted}"
        key = f"linear {name} {element} {candidate.outputs}x{candidate.stages} rows={block_m}"
        found[key] = build(linear_kernel, constants, **options, **types)
        if block_m == 16:
            types = {name: types[name] for name in ("scales", "lows", "out")} | {"words": "*i16"}
            found[f"widen {name} {element}"] = build(widen_four_bit_kernel, kind | {"BLOCK": 32}, **types)
    return found


def rotary() -> dict[str, Used | None]:
    from paceline.core.pages import PAGE_POSITIONS
    from paceline.kernels.gpu.rotary import rotary_kernel

    shape = {"HEADS": 32, "GROUPS": 8, "DIM": 128, "BLOCK_D": 128, "BLOCK_H": 8, "PAGE": PAGE_POSITIONS}
    found = {}
    for element in list(POINTERS.values())[: 1 if FEW else None]:
        types = dict.fromkeys(("qkv", "cosine", "sine", "norm", "out", "keys", "values"), element)
        for turned, normed in ((True, True), (True, False), (False, False)):
            key = f"rotary {element} turned={turned} normed={normed}"
            found[key] = build(rotary_kernel, shape | {"TURNED": turned, "NORMED": normed}, **types)
    return found


def between() -> dict[str, Used | None]:
    from paceline.kernels.gpu.elementwise import add_norm_kernel, gate_kernel, warps_for
    from paceline.kernels.gpu.steps import ACTIVATIONS

    found = {}
    for element in list(POINTERS.values())[: 1 if FEW else None]:
        types = dict.fromkeys(("x", "added", "weight", "bias", "total", "out", "gate_up"), element)
        for width in (4096, 8192)[FEW:]:
            for centred in (False, True):
                shape = {"WIDTH": width, "BLOCK": width, "CENTRED": centred, "WEIGHTED": True, "BIASED": centred}
                shape |= {"ROUNDS": False, "LARGEST": 448.0}
                key = f"add_norm {element} W={width} centred={centred}"
                found[key] = build(add_norm_kernel, shape, warps=warps_for(width), **types)
        for activation in (*ACTIVATIONS, "clamped_silu"):
            shape = {"ACTIVATION": activation, "BLOCK": 1024, "ROUNDS": False, "LARGEST": 448.0}
            found[f"gate {element} {activation}"] = build(gate_kernel, shape, **types)
    return found


def float8() -> dict[str, Used | None]:
    """Activations that are rounded to float8: by the norm, by the gate of 12288 and 14336 numbers, and alone.

    And products of weights with scales for 128 inputs.
    """
    from paceline.kernels.gpu.elementwise import add_norm_kernel, gate_kernel, gate_warps, warps_for
    from paceline.kernels.gpu.float8 import LARGEST, round_rows_kernel
    from paceline.kernels.gpu.linear import CANDIDATES, NO_GROUPS, linear_kernel, most_registers

    if ARCH < 89:
        return {}
    types = dict.fromkeys(("x", "added", "weight", "bias", "total", "out", "gate_up"), "*bf16")
    types["values"] = "*fp8e4nv"
    shape = {"CENTRED": False, "WEIGHTED": True, "BIASED": False, "ROUNDS": True, "LARGEST": LARGEST}
    found = {
        f"add_norm in float8 W={width}": build(
            add_norm_kernel, shape | {"WIDTH": width, "BLOCK": width}, warps=warps_for(width), **types
        )
        for width in (4096, 8192)[FEW:]
    }
    for block_m in () if FEW else (16, 64):
        tile = CANDIDATES[0].fitted(block_m, 1, 2, LARGEST_SHARED[ARCH])
        constants = NO_GROUPS | {
            "GROUP": 128, "SCALED": False, "BIASED": False, "SPLIT": False, "WIDENING": "single", "MAJOR": ARCH // 10,
            "BLOCK_M": block_m, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs,
        }  # fmt: skip
        options = {"warps": tile.warps, "stages": tile.stages, "most": most_registers(ARCH // 10)}
        of_weights = types | {"weight": "*fp8e4nv"}
        found[f"linear *fp8e4nv by 128 *bf16 rows={block_m}"] = build(linear_kernel, constants, **options, **of_weights)
    block = 1 << 14
    gate = {"ACTIVATION": "silu", "BLOCK": block, "ROUNDS": True, "LARGEST": LARGEST}
    alone = {"BLOCK": 4096, "LARGEST": LARGEST}
    return found | {
        f"gate in float8 block={block}": build(gate_kernel, gate, warps=gate_warps(block), **types),
        "round rows": build(round_rows_kernel, alone, warps=warps_for(4096), **types),
    }


def recurrent() -> dict[str, Used | None]:
    from paceline.kernels.gpu import delta_chunks
    from paceline.kernels.gpu.delta_net import delta_kernel, finish_kernel
    from paceline.kernels.gpu.linear import most_registers
    from paceline.kernels.gpu.recurrent import COLUMNS, VALUES, keep_kernel

    found = {}
    shapes = [(16, 16), (16, 32), (16, 48)]  # key and value heads of the smaller Qwen3.5, and of the larger ones
    for element in list(POINTERS.values())[: 1 if FEW else None]:
        types = dict.fromkeys(("projected", "gates", "conv", "decay_bias", "norm", "out"), element)
        types |= dict.fromkeys(("rate", "state", "tail", "inputs", "mixed"), "*fp32")
        tables = dict.fromkeys(("keys", "squares", "decays"), "*fp32")
        for keys, values in shapes[: 1 if FEW or element != "*bf16" else None]:
            heads = {"KEY_HEADS": keys, "VALUE_HEADS": values, "KEY_DIM": 128, "VALUE_DIM": 128}
            blocks = {"TAPS": 4, "KEPT": 32, "BLOCK_K": 128, "BLOCK_V": VALUES, "SCALE": 128**-0.5}
            around_chunks = [] if FEW else [(False, "before chunks"), (False, "behind chunks")]
            for tree, which in [(False, "all"), (True, "all"), *around_chunks]:
                constants = heads | blocks | {"TREE": tree, "NODES": which}
                name = f"tree={tree}" if which == "all" else which
                most = most_registers(ARCH // 10) if tree else None
                found[f"delta {element} heads={keys}/{values} {name}"] = build(
                    delta_kernel, constants, fusion=False, most=most, **types
                )
            of_chunks = {name: value for name, value in (heads | blocks).items() if name not in ("BLOCK_V", "SCALE")}
            for kernel, more, options in (
                (delta_chunks.prepare_kernel, {"SCALE": 128**-0.5}, {"warps": delta_chunks.PREPARE_WARPS}),
                (delta_chunks.walk_kernel, {"BLOCK_V": 16}, {"warps": delta_chunks.WALK_WARPS, "stages": 1}),
            ):
                key = f"{kernel.__name__.removesuffix('_kernel')} chunks {element} heads={keys}/{values}"
                found[key] = build(kernel, of_chunks | more, fusion=False, **options, **types, **tables)
            channels = 128 * (2 * keys + values)
            sizes = {"CHANNELS": channels, "WIDTH": channels + 2 * values, "TAPS": 4, "KEPT": 32, "BLOCK": COLUMNS}
            found[f"keep {element} heads={keys}/{values}"] = build(keep_kernel, sizes, **types)
            line = {"VALUE_HEADS": values, "VALUE_DIM": 128, "CHANNELS": channels, "BLOCK_V": 128}
            found[f"finish delta {element} heads={keys}/{values}"] = build(finish_kernel, line, warps=1, **types)
    from paceline.kernels.gpu.mamba2 import mamba2_kernel, short_conv_kernel

    types = dict.fromkeys(("conv", "conv_bias", "skip"), "*bf16") | {"own": "*fp32", "mixed": "*fp32"}
    types |= dict.fromkeys(("rate", "state", "tail", "inputs"), "*fp32")
    for tree in (False, True):
        heads = {"HEADS": 128, "HEAD_DIM": 64, "GROUPS": 1, "STATE_DIM": 128, "TAPS": 4, "KEPT": 32}
        blocks = {"BLOCK_S": 128, "BLOCK_P": VALUES, "BIASED": True, "TREE": tree}
        found[f"mamba2 heads=128x64 tree={tree}"] = build(mamba2_kernel, heads | blocks, fusion=False, **types)
        sizes = {"CHANNELS": 2048, "TAPS": 3, "KEPT": 32, "BLOCK": COLUMNS, "TREE": tree}
        found[f"short conv C=2048 tree={tree}"] = build(short_conv_kernel, sizes, fusion=False, **types)
    return found


ROUTINGS = {  # experts, used, sigmoid, corrected, groups, used groups
    "qwen3": (128, 8, False, False, 1, 1),
    "gpt-oss": (32, 4, False, False, 1, 1),
    "deepseek-v3": (256, 8, True, True, 8, 4),
}


def experts() -> dict[str, Used | None]:
    from paceline.kernels.gpu import experts as mixture
    from paceline.kernels.gpu.linear import CANDIDATES, FOUR_BIT_CANDIDATES, NO_GROUPS, most_registers

    found = {}
    types = {"scores": "*bf16", "correction": "*fp32", "factors": "*bf16", "weights": "*bf16", "chosen": "*i32"}
    types |= dict.fromkeys(("scores_scale", "output_scale", "margin"), "fp32") | {"order": "*i32", "tiles": "*i32"}
    for name, (count, used, sigmoid, corrected, groups, used_groups) in ROUTINGS.items():
        shape = {
            "EXPERTS": count, "EXPERTS_UP": count, "USED": used, "USED_UP": used, "SIGMOID": sigmoid,
            "NORMALISED": True, "CORRECTED": corrected, "FACTORS": False, "MARGIN": False, "GROUPS": groups,
            "USED_GROUPS": used_groups, "GROUP_BEST": 2, "GROUPS_UP": groups,
        }  # fmt: skip
        found[f"route {name}"] = build(mixture.route_kernel, shape, warps=1, **types)
        for block in (32, 1024)[FEW:]:
            ordering = {"EXPERTS_UP": 2 * count, "BLOCK_M": 16, "BLOCK": block}
            found[f"order {name} pairs={block}"] = build(mixture.order_kernel, ordering, **types)
        found[f"sum {name}"] = build(
            mixture.sum_kernel, {"USED": used, "BLOCK": 1024}, parts="*bf16", weights="*bf16", out="*bf16"
        )
    cases = [("*bf16", "*bf16"), ("*i16", "*bf16"), ("*fp8e4nv", "*bf16")][: 1 if FEW else None]
    for weight, element in cases:
        if weight == "*fp8e4nv" and ARCH < 89:
            continue
        for block_m in mixture.PAIR_TILES[: 1 if FEW else None]:
            tile = CANDIDATES[0].fitted(block_m, 1 + (weight == element), 2, LARGEST_SHARED[ARCH])
            constants = {
                "SHARED": 8, "SCALED": weight != element, "BIASED": False, "BLOCK_M": block_m,
                "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs,
                "WIDENING": element[1:] if weight == "*i16" else "single", "MAJOR": ARCH // 10, **NO_GROUPS,
            }  # fmt: skip
            options = {"warps": tile.warps, "stages": tile.stages, "most": most_registers(ARCH // 10)}
            name = "pairs of int8" if weight == "*i16" else weight
            found[f"grouped {name} {element} pairs={block_m}"] = build(
                mixture.grouped_kernel, constants, **options, **types, x=element, out=element, bias=element,
                weight=weight, lows="*fp16",
            )  # fmt: skip
    for grid, group, shifted in [("int4", 32, True), ("int4", 128, False), ("fp4", 32, False)][: 1 if FEW else None]:
        for block_m in mixture.PAIR_TILES[:: 1 if FEW else 2][: 1 if FEW else None]:
            tile = FOUR_BIT_CANDIDATES[0].of_runs(2 * block_m, 2, LARGEST_SHARED[ARCH])
            constants = {
                "SHARED": 8, "SCALED": False, "BIASED": False, "BLOCK_M": block_m, "BLOCK_N": tile.outputs,
                "BLOCK_K": tile.inputs, "GRID": grid, "GROUP": group, "SHIFTED": shifted, "WIDENING": "bf16",
                "MAJOR": ARCH // 10,
            }  # fmt: skip
            options = {"warps": tile.warps, "stages": tile.stages, "most": most_registers(ARCH // 10)}
            tables = {"weight": "*i16", "lows": "*fp16", "scales": "*u8" if grid == "fp4" else "*fp16"}
            activations = dict.fromkeys(("x", "out", "bias"), "*bf16")
            key = f"grouped {grid} by {group}{' with lows' * shifted} *bf16 pairs={block_m}"
            found[key] = build(mixture.grouped_kernel, constants, **options, **types | tables | activations)
    return found


def low_rank() -> dict[str, Used | None]:
    from paceline.kernels.gpu.low_rank import TOKEN_TILES, expand_kernel, shrink_kernel

    found = {}
    for element in list(POINTERS.values())[: 1 if FEW else None]:
        types = dict.fromkeys(("x", "down", "out", "inner", "up", "y"), element)
        types |= {"ranks": "*i32", "adapters": "*i32", "length": "i32"}
        for tile in TOKEN_TILES:
            shrink, expand = ({"MOST": 48, "BLOCK_M": tile, **block} for block in ({"BLOCK_K": 128}, {"BLOCK_N": 64}))
            found[f"shrink {element} tokens={tile}"] = build(shrink_kernel, shrink, stages=3, **types)
            found[f"expand {element} tokens={tile}"] = build(expand_kernel, expand, stages=3, **types)
    return found


FAMILIES = [
    attention,
    drawing,
    searching,
    accepting,
    shaping,
    linears,
    rotary,
    between,
    recurrent,
    four_bits,
    float8,
    experts,
    low_rank,
]
HEAD = """# The kernels, and what they use

Registers and bytes spilled are a thread's, bytes of shared memory a program's, as the assembler says them for each
architecture: sm_80 (A100), sm_89 (L4, RTX 4090), sm_90 (H100, H200), sm_100 (B200). Nothing here was measured. The
table is written by

```sh
export TRITON_INTERPRET=0 PYTHONPATH=$PWD/src
cd tests/kernels/gpu
python compile_kernels.py --all --arch 80,89,90,100 --table ../../../docs/gpu-kernels.md --codes compiled.txt
```

A dash: the architecture has no instructions for the format (fp8 on sm_80).

"""


def every_kernel(families: Sequence[str]) -> dict[str, Used | None]:
    found: dict[str, Used | None] = {}
    for family in FAMILIES:
        if not families or family.__name__ in families:
            of_family = family()
            found |= of_family
            for name, used in of_family.items():
                print(f"sm_{ARCH} {name}: {shown(used)}", flush=True)
    return found


def table(by_arch: dict[int, dict[str, Used | None]], others: Sequence[str] = ()) -> str:
    """A Markdown table, one line per kernel, with the versions of the compiler. others: its lines so far."""
    names = list(dict.fromkeys(name for found in by_arch.values() for name in found))
    lines = ["| kernel | " + " | ".join(f"sm_{arch}" for arch in by_arch) + " |", "| --- |" + " ---: |" * len(by_arch)]
    of_kernels = {line.split("`")[1]: line for line in others}
    for name in names:
        cells = [shown(found.get(name)) for found in by_arch.values()]
        of_kernels[name] = f"| `{name}` | " + " | ".join(cells) + " |"
    lines += of_kernels.values()
    return HEAD + f"Triton {triton.__version__}. Each cell: registers / spilled / shared.\n\n" + "\n".join(lines) + "\n"


def shown(used: Used | None) -> str:
    return "-" if used is None else f"{used.registers} / {used.spilled} / {used.shared}"


def main(arguments: Sequence[str] | None = None) -> None:
    global FEW, ARCH
    parser = argparse.ArgumentParser()
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--few", action="store_true")
    size.add_argument("--all", action="store_true")
    parser.add_argument("--arch", default="90")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--codes", type=Path, help="file for the hashes of all kernels")
    parser.add_argument("--families", default="", help="these functions' kernels; the table's other lines stay")
    asked = parser.parse_args(arguments)
    FEW, by_arch = asked.few, {}
    families = [name for name in asked.families.split(",") if name]
    for ARCH in (int(arch) for arch in asked.arch.split(",")):
        by_arch[ARCH] = every_kernel(families)
    if asked.table:
        before = asked.table.read_text().splitlines() if families else []
        asked.table.write_text(table(by_arch, [line for line in before if line.startswith("| `")]))
    if asked.codes:
        asked.codes.write_text("\n".join(sorted(CODES)) + "\n")


if __name__ == "__main__":
    main()
