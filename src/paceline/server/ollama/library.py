"""The models of the server as Ollama's API describes them: ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/pull``."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from paceline.errors import PacelineError
from paceline.models.files import hub
from paceline.models.load.facts import ModelFacts, model_facts
from paceline.server import errors
from paceline.server.documents import written
from paceline.server.models import Place, ServedModels
from paceline.server.ollama.replies import (
    OllamaDetails,
    OllamaModel,
    OllamaModelFacts,
    OllamaModelList,
    OllamaStatus,
    timestamp,
)
from paceline.server.streaming import Events

_LATEST = ":latest"  # what Ollama's clients add to a name without a tag
_PATIENCE = 5.0  # seconds for reading what a model's files say
_NEVER = 100 * 365 * 86400.0  # seconds: when a model that stays loaded expires


class Library:
    """Describes the models of a server. Their files are read once, in a thread of their own."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self._facts: dict[str, ModelFacts] = {}
        self._reads: dict[str, asyncio.Task[ModelFacts | None]] = {}

    @property
    def _names(self) -> list[str]:
        return [self._served.first.model_name, *self._served.first.adapters, *self._served.others]

    def name_of(self, name: str) -> str:
        """The served name that a request means: Ollama's clients may add ":latest"."""
        return name if name in self._names else name.removesuffix(_LATEST)

    async def tags(self) -> OllamaModelList:
        """List all models, also those that are not loaded or not on this machine yet."""
        return OllamaModelList(models=[await self._entry(name) for name in self._names])

    async def loaded(self) -> OllamaModelList:
        """List the models that are in memory."""
        found = []
        for name, context in self._served.contexts.items():
            entry, engine, place = await self._entry(name), context.llm.engine, self._served.others.get(name)
            entry.size = engine.memory_bytes
            entry.size_vram = entry.size if engine.models.target.device.type == "cuda" else 0
            entry.context_length = engine.max_model_len
            expires = None if place is None else place.expires
            entry.expires_at = timestamp(time.time() + (_NEVER if expires is None else expires))
            found.append(entry)
        return OllamaModelList(models=found)

    async def show(self, name: str) -> OllamaModelFacts:
        """Describe a model by its files. Raises ApiError if they are not on this machine."""
        facts = await self._facts_of(self._checked(name))
        if facts is None:
            message = f"the files of {name!r} are not on this machine yet; /api/pull fetches them"
            raise errors.not_found(message, "model")
        family = facts.family
        return OllamaModelFacts(
            modelfile=f"FROM {facts.path}\n",
            parameters="\n".join(f"{key} {value}" for key, value in facts.sampling.items()),
            template=facts.chat_template or "",
            license=facts.license or "",
            details=_details(facts),
            model_info={
                "general.architecture": family,
                "general.parameter_count": facts.parameters,
                f"{family}.context_length": facts.context,
                f"{family}.embedding_length": facts.width,
            },
            capabilities=list(facts.abilities),
            modified_at=timestamp(facts.modified),
        )

    async def pull(self, name: str) -> Events:
        """Fetch the files of a model, and yield the lines of a stream. Raises ApiError."""
        source = self._source(self._checked(name))
        yield _status(f"pulling {name}")
        if await asyncio.to_thread(_local, source) is None:
            try:
                await asyncio.to_thread(hub.pull, source, False)
            except PacelineError as error:
                raise errors.from_paceline(error) from error
        yield _status("success")

    def _checked(self, name: str) -> str:
        """The served name that a request means. Raises ApiError (404)."""
        found = self.name_of(name)
        if found not in self._served.others:
            self._served.first.check_model(found)
        return found

    def place(self, name: str) -> Place | None:
        """The place of a model that is loaded on demand; None for the first model. Raises ApiError (404)."""
        return self._served.others.get(self._checked(name))

    def _source(self, name: str) -> str:
        """The name or path of a model's files."""
        place = self._served.others.get(name)
        return self._served.first.llm.engine.models.target.name if place is None else place.source.model

    async def _facts_of(self, name: str) -> ModelFacts | None:
        """What a model's files say; None if they are not on this machine, or cannot be described.

        None also while files of another model are fetched, which no files can be read beside.
        """
        if name in self._facts:
            return self._facts[name]
        if name not in self._reads:
            self._reads[name] = asyncio.create_task(asyncio.to_thread(_facts_at, self._source(name)))
        read = self._reads[name]
        await asyncio.wait({read}, timeout=_PATIENCE)
        if not read.done():
            return None
        self._reads.pop(name, None)
        if (facts := read.result()) is not None:
            self._facts[name] = facts
        return facts

    async def _entry(self, name: str) -> OllamaModel:
        facts = await self._facts_of(name)
        if facts is None:
            return OllamaModel(name=name, model=name, size=0, digest="", details=OllamaDetails())
        return OllamaModel(
            name=name,
            model=name,
            modified_at=timestamp(facts.modified),
            size=facts.size,
            digest=facts.digest,
            details=_details(facts),
        )


def _status(text: str) -> bytes:
    return written(OllamaStatus(status=text)) + b"\n"


def _local(source: str) -> Path | None:
    """The path of a model's files; None if they are not on this machine."""
    with hub.no_network():
        try:
            return hub.resolve(source)
        except PacelineError:
            return None


def _facts_at(source: str) -> ModelFacts | None:
    path = _local(source)
    try:
        return None if path is None else model_facts(path)
    except PacelineError:
        return None


def _details(facts: ModelFacts) -> OllamaDetails:
    return OllamaDetails(
        format=facts.file_format,
        family=facts.family,
        families=[facts.family],
        parameter_size=facts.parameter_size,
        quantization_level=facts.precision,
    )
