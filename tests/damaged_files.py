"""Corrupt model files: generators, and a process that loads each within limits.

Every case is a directory with a small valid model in which one file was changed by a seeded rule. ``python
damaged_files.py FOLDER SEED`` writes all cases, loads each in a separate process and prints one JSON line per case.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import gguf_support
from model_support import FOREIGN, NATIVE, tiny
from paceline import LLM, SamplingParams
from paceline.errors import PacelineError
from paceline.kernels import native
from paceline.models.text.tokenizer import Tokenizer
from quantised_support import awq, compressed, fp8_blocks, gptq
from quantised_support import write as write_quantised

MEMORY = 1 << 30  # bytes that loading may add to the process
CPU_SECONDS = 20
WALL_SECONDS = 120.0
VOCABULARY = 258
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SHAPE = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "head_dim": 16}  # supported by the kernels
WIDE = {"hidden_size": 64, "intermediate_size": 64}  # whole groups of inputs
QUANTISED = {
    "gptq": gptq(4, 32, symmetric=False, ordered=True),
    "awq": awq(32),
    "compressed": compressed(4, 32, symmetric=False),
    "float8": fp8_blocks(32, 32),
}

Rng = random.Random
Damage = Callable[[Path, Rng], str]  # changes the model in a directory; returns the name of the file that it changed


def verdicts_of(program: str, *arguments: str) -> list[dict[str, Any]]:
    """Run this program or ``hostile_files`` in a process; return the JSON lines that it prints."""
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# Whole models


def alphabet() -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "th"]


def backend() -> Backend:
    made = Backend(models.BPE(vocab={token: n for n, token in enumerate(alphabet())}, merges=[("t", "h")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def write_directory(path: Path, kind: str, fields: dict[str, Any], **options: Any) -> None:
    tiny(kind, fields | SHAPE).save_pretrained(path, **options)
    PreTrainedTokenizerFast(
        tokenizer_object=backend(), eos_token="<end>", chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    ).save_pretrained(path)


def write_gguf(path: Path, edit: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> None:
    path.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path / "model.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_block_count, 2),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, alphabet()),
        (writer.add_token_types, [1] * 256 + [3, 1]),
        (writer.add_token_merges, ["t h"]),
        (writer.add_eos_token_id, 256),
        (writer.add_chat_template, TEMPLATE),
    ):
        add(value)
    shapes = {"token_embd.weight": (VOCABULARY, 32), "output_norm.weight": (32,), "rope_freqs.weight": (4,)}
    for layer in range(2):
        parts = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        parts |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = numbers.standard_normal(shape).astype(np.float32) * 0.1 + (len(shape) == 1)
        to = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, to), raw_dtype=to)
    edit(writer)
    gguf_support.finish(writer)


def write_models(folder: Path) -> None:
    write_gguf(folder / "gguf")
    write_directory(folder / "native", *NATIVE["llama"])
    write_directory(folder / "foreign", *FOREIGN["gpt_neox"])
    write_directory(folder / "shards", *NATIVE["llama"], max_shard_size="20KB")
    for name, converter in QUANTISED.items():
        write_directory(folder / name, *NATIVE["llama"])
        kind, fields = NATIVE["llama"]
        write_quantised(folder / name, tiny(kind, fields | SHAPE | WIDE), converter)
    (folder / "split").mkdir()
    gguf_support.copy(
        folder / "gguf" / "model.gguf",
        folder / "split" / "model.gguf",
        lambda _: gguf.GGMLQuantizationType.Q4_0,
        tensors_per_part=8,
    )


# Bytes


def _cut(content: bytearray, rng: Rng, header: int) -> bytearray:
    return content[: rng.choice((rng.randrange(header), rng.randrange(len(content)), len(content) - 1))]


def _flip(content: bytearray, rng: Rng, header: int) -> bytearray:
    for _ in range(rng.choice((1, 1, 3, 30))):
        content[rng.randrange(header)] ^= 1 << rng.randrange(8)
    return content


def _overwrite(content: bytearray, rng: Rng, header: int) -> bytearray:
    at, size = rng.randrange(header), rng.choice((1, 4, 64))
    content[at : at + size] = rng.randbytes(size)
    return content


def _huge_number(content: bytearray, rng: Rng, header: int) -> bytearray:
    """Replace a small eight-byte number (a length, a count, a size, an offset) by a large one."""
    small = [at for at in range(min(header, len(content) - 8)) if not any(content[at + 3 : at + 8])]
    at = rng.choice(small or [0])
    content[at : at + 8] = struct.pack("<Q", rng.choice((2**64 - 1, 2**63, 10**18, 2**40, 2**32, 10**9, 2**24, 0)))
    return content


def _insert(content: bytearray, rng: Rng, header: int) -> bytearray:
    at = rng.randrange(header)
    return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]


def _repeat(content: bytearray, rng: Rng, header: int) -> bytearray:
    at = rng.randrange(header)
    return content[:at] + content[at : at + 200] * 3 + content[at:]


_BYTES = (_cut, _flip, _flip, _overwrite, _huge_number, _huge_number, _insert, _repeat)


def damage_bytes(pattern: str, header: Callable[[bytes], int]) -> Damage:
    def damage(folder: Path, rng: Rng) -> str:
        path = rng.choice(sorted(folder.rglob(pattern)))
        content = path.read_bytes()
        path.write_bytes(rng.choice(_BYTES)(bytearray(content), rng, header(content)))
        return path.name

    return damage


def safetensors_header(content: bytes) -> int:
    return 8 + int(struct.unpack_from("<Q", content)[0])


def damage_safetensors_header(folder: Path, rng: Rng) -> str:
    """Change dtypes, shapes, offsets or types of values in the header, which stays valid JSON."""
    path = rng.choice(sorted(folder.rglob("*.safetensors")))
    content = path.read_bytes()
    end = safetensors_header(content)
    header = json.loads(content[8:end])
    tensor = header[rng.choice([name for name in header if name != "__metadata__"])]
    field = rng.choice(("dtype", "shape", "data_offsets", "shape", "data_offsets", "metadata", "extra"))
    if field == "dtype":
        tensor["dtype"] = rng.choice(("F64", "F16", "BF16", "I8", "F8_E4M3", "F4", "BOOL", "X", 3, None, "U64"))
    elif field == "metadata":
        header["__metadata__"] = rng.choice(([], 3, {"format": 3}, {"format": "tf"}, {"format": "x" * 10**6}, None))
    elif field == "extra":
        header["extra"] = {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}
    elif numbers := tensor[field]:
        at = rng.randrange(len(numbers))
        numbers[at] = rng.choice((10**9, 2**63, 2**64, -1, 0, 1.5, "7", None, [], numbers[at] + 1, 10**30))
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])
    return path.name


# JSON


def _deep(times: int = 100_000) -> str:
    return "[" * times + "]" * times


_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 10**9, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "x", "../../x",
    "/etc/passwd", "acme/other", "\ud800", "\0", "x" * 10**6, [], [1], [[]], {}, {"a": {}}, [10**9] * 3,
    list(range(10**5)), {"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": []},
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON document with each of its keys or indices."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _edit(document: Any, rng: Rng) -> str:
    for _ in range(rng.choice((1, 1, 1, 3))):
        places = list(_places(document))
        shallow = places[:: max(1, len(places) // 60)]  # sample, so that a long vocabulary does not dominate
        owner, key = rng.choice(shallow)
        if rng.random() < 0.15:
            del owner[key]
        else:
            owner[key] = rng.choice(_VALUES)
    return json.dumps(document)


def _broken_text(text: str, rng: Rng) -> bytes:
    whole = text.encode()
    return rng.choice(
        (
            whole[: rng.randrange(len(whole))],
            b"",
            b"\xff\xfe" + text.encode("utf-16-le"),
            b"\xef\xbb\xbf" + whole,
            whole.replace(b'"', b'"\xc3\x28', 1),
            _deep().encode(),
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
            b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}",
            b"null",
            b"[]",
            b'"text"',
            b"7",
            whole + whole,
        )
    )


def damage_scheme(folder: Path, rng: Rng) -> str:
    """Change the quantization_config, which stays valid JSON, or take another model's."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if rng.random() < 0.3:
        config["quantization_config"] = rng.choice([other.config for other in QUANTISED.values()])
    else:
        config["quantization_config"] = json.loads(_edit(config["quantization_config"], rng))
    path.write_text(json.dumps(config))
    return path.name


def damage_json(name: str) -> Damage:
    def damage(folder: Path, rng: Rng) -> str:
        path = folder / name
        text = path.read_text() if path.is_file() else "{}"
        document = json.loads(text)
        if rng.random() < 0.25 or not document:
            path.write_bytes(_broken_text(text, rng))
        else:
            path.write_text(_edit(document, rng), encoding="utf-8", errors="surrogatepass")
        return name

    return damage


_COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
           "head_dim", "vocab_size", "max_position_embeddings")  # fmt: skip


def damage_counts(folder: Path, rng: Rng) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[rng.choice(_COUNTS)] = rng.choice((-1, 0, 3, 10**5, 10**6, 10**9, 2**40, 1.5, "8", None, [8], True))
    path.write_text(json.dumps(config))
    return "config.json"


def damage_kind(folder: Path, rng: Rng) -> str:
    """Change the model family, or add fields that make libraries look elsewhere."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= rng.choice(
        (
            {"model_type": rng.choice(("bert", "t5", "vit", "gemma3", "mamba", "mixtral", "whisper", "llava", "detr"))},
            {"model_type": "qwen2_moe", "num_experts": 10**6},
            {"quantization_config": {"quant_method": rng.choice(("gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "?"))}},
            {"attn_implementation": "acme/kernel", "_attn_implementation": "acme/kernel"},
            {"auto_map": {"AutoConfig": "acme/other--configuration.Config", "AutoModelForCausalLM": "x.Model"}},
            {"rope_scaling": {"rope_type": "longrope", "factor": 1e30}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 0}},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": "x"}},
            {"layer_types": ["full_attention"] * 10**5},
            {"torch_dtype": "float1024", "dtype": "os"},
            {"hidden_act": "rm"},
            {"is_encoder_decoder": True},
        )
    )
    path.write_text(json.dumps(config))
    return "config.json"


def damage_index(folder: Path, rng: Rng) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = rng.choice(list(index["weight_map"]))
    index["weight_map"][name] = rng.choice(
        ("/dev/zero", "/etc/passwd", "../native/model.safetensors", path.name, "config.json", "", ".", "..", "\0",
         "x" * 5000, 3, None, [], {}, "loop.safetensors", "pipe.safetensors", "folder.safetensors")
    )  # fmt: skip
    path.write_text(json.dumps(index))
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    return path.name


BOMBS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ 'x' * 10**12 }}",
    "{{ 10**10**9 }}",
    "{{ 2**(2**40) }}",
    "{% set s = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
    "{{ 'x'.center(10**12) }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ '{:1000000000000d}'.format(1) }}",
    "{{ [1, 2] | batch(10**12, 'x') | list }}",
    "{{ lipsum(n=10**9) }}",
    "{{ messages | tojson(indent=10**10) }}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ cycler.__init__.__globals__.os.system('touch /tmp/was-here') }}",
    "{% for",
    "{{ undefined.x.y }}",
    "{{ raise_exception('x' * 100000) }}",
    "(" * 100000 + "{{" + "(" * 10000 + "}}",
    "{{ " + "not " * 50000 + "1 }}",
    "{{ 'a' | replace('a', 'b' * 10000) | replace('b', 'c' * 10000) | replace('c', 'd' * 10000) }}",
    "",
)


def one_template(number: int) -> Damage:
    def damage(folder: Path, _: Rng) -> str:
        (folder / "chat_template.jinja").write_text(BOMBS[number])
        return "chat_template.jinja"

    return damage


_GGUF_VALUES = (
    *((kind, number) for kind in ("UINT32", "UINT64") for number in (0, 1, 3, 7, 10**5, 2**31, 2**32 - 1)),
    *(("INT32", number) for number in (-1, -(2**31))),
    *(("FLOAT32", number) for number in (0.0, -1.0, 1e38, float("nan"), float("inf"))),
    *(("STRING", text) for text in ("", "x", "yarn", "llama", "qwen2", "gemma3", "gpt2", "bert", TEMPLATE, "{%")),
    *(("ARRAY", items) for items in ([1], [2**30] * 3, ["x"] * 300, ["a b"], ["\0", ""], [1.5], [True] * 258)),
    ("BOOL", True),
)
_GGUF_EXTRA = (
    "split.count", "general.alignment", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count",
    "llama.rope.dimension_count", "llama.attention.key_length", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.eot_token_id"
)  # fmt: skip


def damage_gguf_values(folder: Path, rng: Rng) -> str:
    """Remove or change a key, or the shape, type, name or offset of a tensor; the file stays well-formed."""

    def edit(writer: gguf.GGUFWriter) -> None:
        keys, tensors = writer.kv_data[0], writer.tensors[0]
        if rng.random() < 0.25:
            tensor = tensors[rng.choice(list(tensors))]
            tensor.shape = rng.choice(((2**40, 2**40), (10**9,), (0,), (), (32, 32), (2**63,), (1,) * 9, (32, 2**32)))
        elif rng.random() < 0.2:
            tensors[rng.choice(("x", "", "blk..x", "blk.99.attn_q.weight"))] = tensors.pop(rng.choice(list(tensors)))
        else:
            key = rng.choice((*keys, *_GGUF_EXTRA))
            kind, value = rng.choice(_GGUF_VALUES)
            keys[key] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType[kind])
            if rng.random() < 0.1:
                del keys[key]

    write_gguf(folder, edit)
    return "model.gguf"


def _gguf_header(content: bytes) -> int:
    return content.index(b"rope_freqs.weight")


def _part_header(content: bytes) -> int:
    return min(len(content), 1000)


# kind of model, damage, number of cases
CASES: list[tuple[str, str, Damage, int]] = [
    ("gguf", "bytes", damage_bytes("*.gguf", _gguf_header), 40),
    ("gguf", "values", damage_gguf_values, 120),
    ("native", "safetensors", damage_bytes("*.safetensors", safetensors_header), 20),
    ("foreign", "safetensors", damage_bytes("*.safetensors", safetensors_header), 8),
    ("native", "header", damage_safetensors_header, 25),
    ("foreign", "header", damage_safetensors_header, 12),
    ("native", "config", damage_json("config.json"), 30),
    ("foreign", "config", damage_json("config.json"), 12),
    ("native", "counts", damage_counts, 25),
    ("foreign", "counts", damage_counts, 20),
    ("native", "kind", damage_kind, 16),
    ("foreign", "kind", damage_kind, 12),
    ("native", "tokenizer", damage_json("tokenizer.json"), 35),
    ("native", "tokenizer config", damage_json("tokenizer_config.json"), 20),
    ("native", "generation", damage_json("generation_config.json"), 15),
    ("native", "special tokens", damage_json("special_tokens_map.json"), 6),
    ("shards", "index", damage_index, 20),
    ("shards", "index json", damage_json("model.safetensors.index.json"), 8),
    ("split", "split bytes", damage_bytes("*.gguf", _part_header), 30),
    *[(kind, "quantised header", damage_safetensors_header, 10) for kind in QUANTISED],
    *[(kind, "quantised bytes", damage_bytes("*.safetensors", safetensors_header), 6) for kind in QUANTISED],
    *[(kind, "quantised scheme", damage_scheme, 12) for kind in QUANTISED],
    *[("native", f"template {n}", one_template(n), 1) for n in range(len(BOMBS))],
]
if native.select() is not None:
    CASES += [
        ("packed", "packed", damage_bytes("packed/*.safetensors", safetensors_header), 12),
        ("packed", "packed header", damage_safetensors_header, 8),
    ]


# Loading in separate processes


def use(folder: Path) -> None:
    """Load the model, generate, and apply its chat template."""
    source = next(folder.glob("*.gguf"), folder)
    os.environ |= {"PACELINE_CACHE": str(folder / "cache"), "PACELINE_PACKED_CACHE": "on"}
    tokenizer = Tokenizer.load(source)
    precision: Any = "int8" if (folder / "cache").is_dir() else "int4" if folder.name in QUANTISED else None
    llm = LLM(source, quantization=precision, device="cpu", max_model_len=32, max_batch_size=1)
    llm.generate([[1, 2, 3], "the"], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    tokenizer.chat([{"role": "user", "content": "hello"}])


def limited(folder: Path) -> dict[str, str]:
    """Load the model; return the outcome "loaded", "refused" or "failed", with the error."""
    try:
        use(folder)
    except PacelineError as error:
        return {"end": "refused", "error": type(error).__name__, "message": str(error)}
    except BaseException as error:  # noqa: BLE001  (the test looks for any other exception)
        return {"end": "failed", "error": type(error).__name__, "message": traceback.format_exc()[-1500:]}
    return {"end": "loaded"}


def in_own_process(folder: Path) -> dict[str, Any]:
    """Load in a child process within limits. Adds seconds and the peak resident memory in MiB to the outcome."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.write(writer, json.dumps(limited(folder)).encode()[:60000])
        os._exit(0)
    os.close(writer)
    status, usage = _wait(child)
    said = os.read(reader, 65536)
    os.close(reader)
    verdict = json.loads(said) if said else {"end": "failed", "error": f"died with status {status}", "message": ""}
    return verdict | {"seconds": round(time.monotonic() - started, 2), "mib": usage >> 10}


def _wait(child: int) -> tuple[int, int]:
    """Wait for the child; return its exit status and its peak resident memory in KiB."""
    deadline = time.monotonic() + WALL_SECONDS
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage.ru_maxrss
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)


def cases(seed: int) -> Iterator[tuple[str, str, Damage, Rng]]:
    for kind, name, damage, count in CASES:
        for number in range(count):
            label = f"{kind}, {name} {number}"
            yield kind, label, damage, Rng(f"{seed} {label}")


def main(folder: Path, seed: int, only: str = "") -> None:
    torch.set_num_threads(1)
    whole = folder / "whole"
    whole.mkdir(parents=True)
    write_models(whole)
    if native.select() is not None:
        shutil.copytree(whole / "native", whole / "packed")
        (whole / "packed" / "cache").mkdir()
    print(json.dumps({"case": "idle", "mib": in_own_process(whole / "nothing")["mib"]}), flush=True)
    for kind in sorted(path.name for path in whole.iterdir()):
        print(json.dumps({"case": f"whole {kind}", "file": "", **in_own_process(whole / kind)}), flush=True)
    for kind, label, damage, rng in cases(seed):
        if only not in label:
            continue
        place = folder / "damaged" / kind
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(whole / kind, place, symlinks=True)
        file = damage(place, rng)
        print(json.dumps({"case": label, "file": file, **in_own_process(place)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
