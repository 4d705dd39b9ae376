"""Damage by seeded rules, after which a model loads or is refused by name."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gguf

from hostile.cases import Case, in_gguf
from hostile.small_models import MODELS, QUANTISED, TEMPLATE
from paceline import LLM, SamplingParams
from paceline.kernels import native
from paceline.models.text.tokenizer import Tokenizer

SEED = 1
Rng = random.Random


class RandomDamage(Protocol):
    """Changes the model in a folder."""

    def __call__(self, folder: Path, rng: Rng) -> object: ...


def use(folder: Path) -> None:
    """Load the model, generate, and apply its chat template."""
    source = next(folder.glob("*.gguf"), folder)
    os.environ |= {"PACELINE_CACHE": str(folder / "cache"), "PACELINE_PACKED_CACHE": "on"}
    tokenizer = Tokenizer.load(source)
    precision: Any = "int8" if (folder / "cache").is_dir() else "int4" if folder.name in QUANTISED else None
    llm = LLM(source, quantization=precision, device="cpu", max_model_len=32, max_batch_size=1)
    llm.generate([[1, 2, 3], "the"], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    tokenizer.chat([{"role": "user", "content": "hello"}])


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


def damage_bytes(pattern: str, header: Callable[[bytes], int]) -> RandomDamage:
    def damage(folder: Path, rng: Rng) -> None:
        path = rng.choice(sorted(folder.rglob(pattern)))
        content = path.read_bytes()
        path.write_bytes(rng.choice(_BYTES)(bytearray(content), rng, header(content)))

    return damage


def safetensors_header(content: bytes) -> int:
    return 8 + int(struct.unpack_from("<Q", content)[0])


def damage_header(folder: Path, rng: Rng) -> None:
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


def damage_json(file: str) -> RandomDamage:
    def damage(folder: Path, rng: Rng) -> None:
        path = folder / file
        text = path.read_text() if path.is_file() else "{}"
        document = json.loads(text)
        if rng.random() < 0.25 or not document:
            path.write_bytes(_broken_text(text, rng))
        else:
            path.write_text(_edit(document, rng), encoding="utf-8", errors="surrogatepass")

    return damage


def damage_config(fields: Callable[[dict[str, Any], Rng], dict[str, Any]]) -> RandomDamage:
    """Add or change fields of config.json, which stays valid JSON."""

    def damage(folder: Path, rng: Rng) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields(config, rng)))

    return damage


def _scheme(config: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """Return a changed quantization_config, or another model's."""
    if rng.random() < 0.3:
        return {"quantization_config": rng.choice([other.config for other in QUANTISED.values()])}
    return {"quantization_config": json.loads(_edit(config["quantization_config"], rng))}


_COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
           "head_dim", "vocab_size", "max_position_embeddings")  # fmt: skip


def _count(_: dict[str, Any], rng: Rng) -> dict[str, Any]:
    return {rng.choice(_COUNTS): rng.choice((-1, 0, 3, 10**5, 10**6, 10**9, 2**40, 1.5, "8", None, [8], True))}


def _kind(_: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """Return another model family, or fields that make libraries look elsewhere."""
    fields: tuple[dict[str, Any], ...] = (
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
    return rng.choice(fields)


def damage_index(folder: Path, rng: Rng) -> None:
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


def one_template(number: int) -> RandomDamage:
    return lambda folder, rng: (folder / "chat_template.jinja").write_text(BOMBS[number])


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


def damage_gguf_values(folder: Path, rng: Rng) -> None:
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

    in_gguf(edit)(folder)


def _gguf_header(content: bytes) -> int:
    return content.index(b"rope_freqs.weight")


def _part_header(content: bytes) -> int:
    return min(len(content), 1000)


# model, name, damage, number of cases
_TABLE: list[tuple[str, str, RandomDamage, int]] = [
    ("gguf", "bytes", damage_bytes("*.gguf", _gguf_header), 40),
    ("gguf", "values", damage_gguf_values, 120),
    ("native", "safetensors", damage_bytes("*.safetensors", safetensors_header), 20),
    ("foreign", "safetensors", damage_bytes("*.safetensors", safetensors_header), 8),
    ("native", "header", damage_header, 25),
    ("foreign", "header", damage_header, 12),
    ("native", "config", damage_json("config.json"), 30),
    ("foreign", "config", damage_json("config.json"), 12),
    ("native", "counts", damage_config(_count), 25),
    ("foreign", "counts", damage_config(_count), 20),
    ("native", "kind", damage_config(_kind), 16),
    ("foreign", "kind", damage_config(_kind), 12),
    ("native", "tokenizer", damage_json("tokenizer.json"), 35),
    ("native", "tokenizer config", damage_json("tokenizer_config.json"), 20),
    ("native", "generation", damage_json("generation_config.json"), 15),
    ("native", "special tokens", damage_json("special_tokens_map.json"), 6),
    ("shards", "index", damage_index, 20),
    ("shards", "index json", damage_json("model.safetensors.index.json"), 8),
    ("split", "split bytes", damage_bytes("*.gguf", _part_header), 30),
    *[(kind, "quantised header", damage_header, 10) for kind in QUANTISED],
    *[(kind, "quantised bytes", damage_bytes("*.safetensors", safetensors_header), 6) for kind in QUANTISED],
    *[(kind, "quantised scheme", damage_config(_scheme), 12) for kind in QUANTISED],
    *[("native", f"template {n}", one_template(n), 1) for n in range(len(BOMBS))],
]
if native.select() is not None:
    _TABLE += [
        ("packed", "packed", damage_bytes("packed/*.safetensors", safetensors_header), 12),
        ("packed", "packed header", damage_header, 8),
    ]


def cases() -> Iterator[Case]:
    for kind, name, damage, count in _TABLE:
        for number in range(count):
            rng = Rng(f"{SEED} {kind}, {name} {number}")
            changed = partial(damage, rng=rng)
            yield Case(kind, f"{name} {number}", MODELS[kind], changed, (use,), None)
