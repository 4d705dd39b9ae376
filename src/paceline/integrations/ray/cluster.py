"""Connecting to Ray, or starting it here, and the resources of each replica."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import EngineOptions
from paceline.errors import MissingPackageError, ParameterError

if TYPE_CHECKING:
    from paceline.llm import LLM

LOCAL = "local"
_STORE = 2**27  # bytes of shared memory: requests and answers are small


@dataclass(frozen=True)
class Recipe:
    """Everything a replica needs to load the model. documents: texts that the n-gram drafter may copy from."""

    model: str
    draft_model: str | None
    documents: Sequence[str]
    options: EngineOptions

    def load(self) -> LLM:
        """Load the model in the replica's process."""
        from paceline.llm import LLM

        return LLM(self.model, self.draft_model, reference_documents=self.documents, **self.options)


@dataclass(frozen=True)
class Share:
    """Resources of each replica. threads: CPU cores; gpus: whole devices."""

    threads: int
    gpus: int

    @property
    def ray_options(self) -> dict[str, float]:
        """The resources under Ray's option names."""
        return {"num_cpus": self.threads, "num_gpus": self.gpus}

    def __str__(self) -> str:
        devices = f", {self.gpus} GPU" if self.gpus else ""
        return f"{self.threads} {'thread' if self.threads == 1 else 'threads'}{devices} each"


def need_ray() -> Any:
    """The ``ray`` module. Raises MissingPackageError."""
    try:
        import ray
        import ray.serve
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name, "ray") from error
    return ray


@contextmanager
def joined(address: str, cores: int) -> Iterator[Any]:
    """Ray, shut down at the end. address: "local" starts it in this process, with this number of cores, on loopback
    only.

    Raises ParameterError if there is no Ray at the address.
    """
    ray = need_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own: dict[str, Any] = {
        "num_cpus": cores,
        "include_dashboard": False,
        "object_store_memory": _STORE,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        ray.init(address=address, logging_level="WARNING", **(own if address == LOCAL else {}))
    except (ConnectionError, ValueError) as error:
        allowed = (
            f'the address of Ray\'s head, as HOST:PORT; "auto" for this machine\'s; "{LOCAL}" to start one ({error})'
        )
        raise ParameterError("ray_address", address, allowed) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def shared(ray: Any, recipe: Recipe, replicas: int) -> tuple[Recipe, Share]:
    """The recipe with the threads and device of each replica. Raises ParameterError if not all replicas fit."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, gpus = ([int(node.get(kind, 0)) for node in alive] for kind in ("CPU", "GPU"))
    device, wanted = device_of(str(recipe.options.get("device", "auto")), sum(gpus), replicas)
    share = Share(threads_of(recipe.options.get("threads"), replicas, cores), wanted)
    options: EngineOptions = {**recipe.options, "threads": share.threads, "device": device}
    model, draft = placed(recipe.model), None if recipe.draft_model is None else placed(recipe.draft_model)
    return replace(recipe, model=model, draft_model=draft, options=options), share


def threads_of(given: int | None, replicas: int, cores: Sequence[int]) -> int:
    """Threads per replica: ``given``, or the most with which all replicas fit on machines with these cores.

    Raises ParameterError if they do not fit.
    """

    def fit(threads: int) -> bool:
        return sum(each // threads for each in cores) >= replicas

    if given is not None and not fit(given):
        allowed = f"fewer, or fewer replicas than {replicas}: Ray's machines have {', '.join(map(str, cores))} cores"
        raise ParameterError("threads", given, allowed)
    fitting = [threads for threads in range(1, max(cores, default=0) + 1) if fit(threads)]
    if given is None and not fitting:
        raise ParameterError("replicas", replicas, f"at most {sum(cores)}, the cores of Ray's machines")
    return fitting[-1] if given is None else given


def device_of(given: str, gpus: int, replicas: int) -> tuple[str, int]:
    """The device of each replica, and the number of Ray's GPUs that each takes. Raises ParameterError."""
    if given not in ("auto", "cpu", "cuda"):
        raise ParameterError("device", given, "auto, cpu or cuda with replicas: Ray assigns each one a device")
    if given == "cuda" and gpus < replicas:
        raise ParameterError("replicas", replicas, f"at most {gpus}, the GPUs of Ray's machines; or --device cpu")
    on_gpu = given == "cuda" or (given == "auto" and gpus >= replicas)
    return ("cuda", 1) if on_gpu else ("cpu", 0)


def placed(name: str) -> str:
    """A model's name; the absolute path of a file or directory, because workers may run in another directory."""
    path = Path(name)
    return str(path.resolve()) if path.exists() else name
