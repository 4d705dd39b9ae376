"""A thousand random schemas, many of them invalid: none hangs, affects another one, or gives an invalid answer."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest
import torch

from paceline.config import StructuredOutputs
from paceline.errors import ParameterError, StructureError
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured.grammars import Grammars
from paceline.structured.limits import GrammarLimits
from server_support import byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

SCHEMAS = 1000
TOKENS = 120  # of an answer; longer ones are not checked
LETTERS = [
    "a",
    "b",
    ".",
    "é",
    "\\d",
    "\\w",
    "\\s",
    "\\S",
    "[a-c]",
    "[^a]",
    '"',
    "\\\\",
    "\\n",
    "😀",
    "x",
    "[\\x00-\\x1f]",
]
FORMATS = ["date", "time", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid", "uri"]
NAMES = ["a", "b", "ab", 'q"', "back\\slash", "line\nend", "é", "", "\x01", "😀", "\ud800", "a/b~c"]
WRONG = [None, -1, 1.5, True, "x", [], {}, 10**30, [1], {"type": "nonsense"}]


class RandomSchemas:
    """Generates random schemas. fault_rate: probability that a part of a schema is made invalid."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.fault_rate = self.chance.choice([0, 0, 0.02, 0.1])

    def pattern(self, depth: int = 3) -> str:
        chance, kind = self.chance, self.chance.randrange(8)
        if depth == 0 or kind < 2:
            return chance.choice(LETTERS)
        if kind < 4:
            return self.pattern(depth - 1) + self.pattern(depth - 1)
        if kind == 4:
            return f"({self.pattern(depth - 1)}|{self.pattern(depth - 1)})"
        inner = f"({self.pattern(depth - 1)})"
        if chance.random() < self.fault_rate:
            return chance.choice(["^", "$", "(?=a)", "\\b", "\\1", "(", "[]", "\\A", "(?i)", "{,3}"]) + inner
        low = chance.choice([0, 1, 2, 7])
        most = low + chance.choice([0, 1, 5, 40, 120])
        return inner + chance.choice(["*", "+", "?", "*?", f"{{{low}}}", f"{{{low},}}", f"{{{low},{most}}}"])

    def count(self) -> Any:
        return self.chance.choice([0, 1, 2, 3, 5, 40, 128])

    def schema(self, depth: int = 3) -> Any:
        chance = self.chance
        made = self._schema(depth)
        if isinstance(made, dict) and made and chance.random() < self.fault_rate:
            made[chance.choice([*made, "not", "oneOf", "$ref", "minItems"])] = chance.choice(WRONG)
        return made

    def _schema(self, depth: int) -> Any:
        chance = self.chance
        kinds = ["string", "pattern", "length", "format", "number", "integer", "enum", "const", "plain", "any", "ref"]
        kind = chance.choice(kinds + (["object", "array", "tuple", "anyOf", "map"] * 3 if depth else []))
        if kind == "pattern":
            return {"type": "string", "pattern": chance.choice(["{}", "^{}$"]).replace("{}", self.pattern())}
        if kind == "length":
            return {"type": "string", "minLength": self.count(), "maxLength": self.count()}
        if kind == "format":
            return {"type": "string", "format": chance.choice(FORMATS)}
        if kind in ("number", "integer"):
            low = chance.choice([-1000, -3, 0, 1, 7, 99])
            bounds = {"minimum": low, "exclusiveMaximum": low + chance.choice([1, 2, 0.5, 10, 12345])}
            return {"type": kind, **dict(chance.sample(sorted(bounds.items()), chance.randrange(3)))}
        if kind in ("enum", "const"):
            values = [chance.choice([*NAMES, 1, 1.5, None, True, [1, "x"], {"k": "v"}, 1e30]) for _ in range(3)]
            return {"enum": values} if kind == "enum" else {"const": values[0]}
        if kind == "ref":
            return {"$ref": chance.choice(["#", "#/$defs/d", "#/$defs/d", "#/$defs/e", "http://x.test/y"])}
        if kind == "object":
            names = chance.sample(NAMES, chance.randrange(4))
            made = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
            made["required"] = [name for name in names if chance.random() < 0.5]
            if chance.random() < 0.4:
                made["additionalProperties"] = chance.choice([False, True, self.schema(depth - 1)])
            if chance.random() < 0.2:
                made[chance.choice(["minProperties", "maxProperties"])] = chance.randrange(4)
            return made
        if kind == "map":
            return {"type": "object", "additionalProperties": self.schema(depth - 1)}
        if kind == "array":
            return {"type": "array", "items": self.schema(depth - 1), "maxItems": chance.choice([1, 3, 128])}
        if kind == "tuple":
            first = [self.schema(depth - 1) for _ in range(chance.randrange(1, 4))]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": chance.randrange(len(first) + 1)}
        if kind == "anyOf":
            return {"anyOf": [self.schema(depth - 1) for _ in range(chance.randrange(1, 4))]}
        return {} if kind == "any" else {"type": chance.choice(["string", "boolean", "null", ["null", "integer"]])}

    def whole(self) -> Any:
        made = self.schema()
        if isinstance(made, dict):
            made["$defs"] = {"d": self.schema(2), "e": {"type": "array", "items": self.schema(1)}}
        return made


class RandomAnswers:
    """Generates answers without a model: random allowed tokens, with a bias towards those that close something."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.grammars = Grammars(tokenizer, vocab_size, tokenizer.eos_token_ids, limits)
        self.bias = torch.zeros(vocab_size)
        for closing in '"}],':
            self.bias[tokenizer.encode(closing, add_special_tokens=False)[0]] = 6.0
        self.bias[list(tokenizer.eos_token_ids)] = 8.0

    def answer(self, constraint: Any, chance: torch.Generator) -> bytes | None:
        """An answer; None if it did not end within TOKENS."""
        text = b""
        for _ in range(TOKENS):
            logits = self.bias.clone()[None]
            constraint.mask([], 0, logits)
            token = int(torch.multinomial(logits[0].softmax(-1), 1, generator=chance))
            constraint.advance([token])
            if token in self.tokenizer.eos_token_ids:
                return text
            text += self.tokenizer.token_bytes(token)
        return None


def run(runner: RandomAnswers, schemas: int) -> Counter[str]:
    """Counts of the outcomes of ``schemas`` random schemas."""
    counts: Counter[str] = Counter()
    neighbour = runner.grammars.compile(StructuredOutputs(regex="(yes|no)( yes| no)*"))
    for seed in range(schemas):
        schema, started = RandomSchemas(seed).whole(), time.monotonic()
        try:
            make = runner.grammars.compile(StructuredOutputs(json=schema))
        except (StructureError, ParameterError) as error:
            counts["too much" if "too much" in str(error) else "refused"] += 1
            counts["crashed"] += "crashes" in str(error) or "killed" in str(error)
            counts["unnamed"] += "structure cannot be followed" in str(error)
            if "structure cannot be followed" in str(error) or "crashes" in str(error):
                print(seed, error, json.dumps(schema)[:300])
            continue
        finally:
            counts["slowest ms"] = max(counts["slowest ms"], int(1000 * (time.monotonic() - started)))
        counts["accepted"] += 1
        chance = torch.Generator().manual_seed(seed)
        for _ in range(2):
            try:
                text = runner.answer(make(), chance)
            except StructureError as error:
                counts["ended"] += 1
                print(seed, "ended:", error, json.dumps(schema)[:300])
                continue
            counts["finished" if text is not None else "open"] += 1
            if text is not None:
                jsonschema_rs.validate(schema, json.loads(text.decode()))
        if seed % 10 == 0:
            assert runner.answer(neighbour(), torch.Generator().manual_seed(1)) is not None
    return counts


def test_random_schemas_are_refused_or_enforced_exactly() -> None:
    tokenizer = Tokenizer.load(byte_tokenizer())
    counts = run(RandomAnswers(tokenizer, tokenizer.vocab_size, GrammarLimits(compile_cpu_seconds=2.0)), SCHEMAS)
    print(dict(counts))
    assert counts["accepted"] > SCHEMAS // 4
    assert counts["finished"] > counts["accepted"] // 2
    assert counts["ended"] == counts["unnamed"] == counts["crashed"] == 0
    assert counts["slowest ms"] < 20_000
