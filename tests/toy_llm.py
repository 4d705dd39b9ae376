"""An ``LLM`` on toy models, without files."""

from __future__ import annotations

from typing import Any

from paceline.config import EngineConfig
from paceline.engine.engine import Engine, Models
from paceline.engine.requests import RequestMaker
from paceline.engine.sharing import SharedEngine
from paceline.llm import LLM
from paceline.models.text.tokenizer import Tokenizer
from toy import VOCAB, ToyModel


def toy_llm(positions: int = 200, tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
    options = {"max_batch_size": 4, "max_model_len": positions, "device": "cpu", "dtype": "float32"} | options
    vocab = VOCAB if tokenizer is None else tokenizer.vocab_size
    draft = ToyModel(vocab, max_positions=positions, blur=0.2) if options.get("drafter") == "model" else None
    llm = LLM.__new__(LLM)
    llm.tokenizer, llm._recommended, llm._pooling = tokenizer, {}, None
    llm._models = Models(ToyModel(vocab, max_positions=positions), draft)
    llm.requests = RequestMaker(tokenizer, vocab, llm._models.eos_token_ids)
    llm._shared = SharedEngine(Engine(llm._models, EngineConfig(**options)))
    return llm
