"""What a batch job's answers depend on, and the server without its network that gives them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from paceline.config import SamplingParams, ServerConfig
from paceline.config.limits import DEFAULT_ACCEPTANCE
from paceline.config.sampling import sampling_values
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.server.context import Context

_VERSION = 1
_POLL = 0.01  # seconds between two looks at whether the model is loaded


def settings_of(llm: LLM, params: SamplingParams, chat_params: SamplingParams) -> dict[str, Any]:
    """The settings that answers depend on, besides the lines and the seed."""
    identity, config = llm.engine.identity(), llm.config
    draft_tokens = identity.drafter if config.acceptance != DEFAULT_ACCEPTANCE else None
    settings = {
        "version": _VERSION,
        "model": identity.target,
        "precision": identity.precision.partition(", draft")[0],
        "attention": identity.attention,
        "max_model_len": llm.engine.max_model_len,
        "acceptance": identity.acceptance,
        "drafter": draft_tokens,
        "params": dataclasses.asdict(params),
        "chat_sampling": sampling_values(chat_params),
    }
    return dict(json.loads(json.dumps(settings)))


@asynccontextmanager
async def running(llm: LLM, config: ServerConfig) -> AsyncIterator[Context]:
    """A server without its network and without latency limits. Raises PacelineError if it stops by itself."""
    llm.engine.expect(watched=False)
    context = Context(config, lambda: llm, lambda: None)
    context.service.start()
    try:
        while context.service.is_loading:
            await asyncio.sleep(_POLL)
        yield context
    except PacelineError as error:
        failure = context.service.failure
        raise (failure if isinstance(failure, PacelineError) else error) from error
    finally:
        await context.service.stop()
        context.close()
