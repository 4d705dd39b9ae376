"""Starting ranks: rank 0 spawns the others, or a launcher such as torchrun has started all of them.

They find each other in a store: a private file, or the launcher's store. Rank 0 puts the model's settings there as
    JSON. Then they listen on 127.0.0.1, or on the interface that GLOO_SOCKET_IFNAME names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from paceline.config import QuantizationName
from paceline.core.cpus import Node, pinned
from paceline.core.job_objects import SUSPENDED, JobObject
from paceline.errors import ParameterError, RankError
from paceline.kernels.native import kernel_threads
from paceline.models.description.shards import ModelShard
from paceline.models.description.spec import DecoderSpec
from paceline.models.files.boundary import Source, name_of
from paceline.models.load.loading import check_shardable, description_of, load_shard, open_checkpoint
from paceline.models.load.prepare import ModelOptions, why_not_on_kernels
from paceline.models.parallel.follower import Follower, NativeFollower, TorchFollower
from paceline.models.parallel.group import FOREVER, Ranks
from paceline.models.parallel.leading import RankProcesses
from paceline.models.parallel.model import LeadingPart, PartOfModel
from paceline.models.parallel.native import LeadingNative, NativePart, exchange_bytes, new_exchange, open_exchange
from paceline.models.parallel.plan import Op, Step, as_numbers

_LOOK = 0.02  # seconds between two checks whether the others are ready
_WATCH = 0.2  # seconds between two checks whether they still run
_END_TIMEOUT = 5.0  # seconds that a rank has to end after it was told to

Native = TypeVar("Native", bound=NativePart)


@dataclass(frozen=True)
class Settings:
    """Settings of every rank. device: rank 0's, from which the others' follow. threads: per rank.

    source: the model's absolute path; of a model that was named, the name, which each machine finds in its own cache.
    quantization: of the CPU kernels. nodes: the NUMA nodes of each rank on them; empty: the system places it.
    exchange: the name of the memory in which parts on the CPU kernels exchange activations; None: torch runs the parts.
    """

    source: str
    dtype: str
    device: str
    threads: int
    quantization: QuantizationName | None = None
    nodes: Sequence[Sequence[tuple[int, Sequence[int]]]] = ()
    exchange: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def nodes_of(self, rank: int) -> tuple[Node, ...]:
        """The NUMA nodes of a rank."""
        return tuple(Node(number, tuple(cpus)) for number, cpus in self.nodes[rank]) if self.nodes else ()

    def native_part(self, kind: type[Native], share: ModelShard) -> Native:
        """Pack a rank's part of the model on the CPU kernels."""
        assert self.exchange is not None
        whole = open_checkpoint(self.source)
        assert whole is not None, "check_shardable refuses other families"
        assert self.quantization != "fp8", "_runs_on_kernels refuses it"
        memory = open_exchange(self.exchange, exchange_bytes(whole.spec, share.ranks))
        return kind(whole, share, memory, self.torch_dtype, self.quantization)

    def check(self, ranks: int) -> None:
        """Raise ParameterError if this machine does not have a device for each of the ranks."""
        last = self.device_of(ranks - 1)
        if last.type == "cuda" and last.index >= (have := torch.cuda.device_count()):
            allowed = f"at most {have} from {self.device!r} on: every rank needs a CUDA device of its own"
            raise ParameterError("tensor_parallel", ranks, allowed)

    def device_of(self, place: int) -> torch.device:
        """The device of the rank with number ``place`` on its machine."""
        device = torch.device(self.device)
        return torch.device("cuda", (device.index or 0) + place) if device.type == "cuda" else device


class Spawned:
    """Processes started by rank 0, and the directory of their store."""

    def __init__(self, ranks: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="paceline-ranks-"))
        path = self._directory / "store"
        self.store: Store = FileStore(str(path), ranks)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._jobs: list[JobObject] = []
        for rank in range(1, ranks):
            self.processes.append(_spawn(path, ModelShard(rank, ranks)))
            if sys.platform == "win32":
                self._jobs.append(JobObject(self.processes[-1]))
        self._ended = threading.Event()

    def find_ended(self, patience: float = 0.0) -> str | None:
        deadline = time.monotonic() + patience
        while True:
            for rank, process in enumerate(self.processes, 1):
                if (status := process.poll()) is not None:
                    return f"rank {rank} of {len(self.processes) + 1} has ended ({_how(status)})"
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK)

    def end(self, ranks: Ranks | None, *, orderly: bool) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if orderly and ranks is not None:
            _tell_to_end(ranks)
        for process in self.processes:
            _end(process, orderly)
        shutil.rmtree(self._directory, ignore_errors=True)

    def watch(self, call: Callable[[], None]) -> None:
        """Call ``call``, in a thread of its own, when a rank has ended by itself."""

        def look() -> None:
            while not self._ended.wait(_WATCH):
                if self.find_ended() is not None:
                    call()
                    return

        threading.Thread(target=look, daemon=True, name="paceline-ranks").start()


class Launched:
    """Ranks started by a launcher, which ends all of them when one ends."""

    def __init__(self, store: Store) -> None:
        self.store, self._ended = store, False

    def find_ended(self, patience: float = 0.0) -> str | None:
        return None

    def end(self, ranks: Ranks | None, *, orderly: bool) -> None:
        if orderly and ranks is not None and not self._ended:
            _tell_to_end(ranks)
        self._ended = True

    def watch(self, call: Callable[[], None]) -> None:
        """Do nothing: the launcher watches the ranks."""


def _spawn(store: Path, share: ModelShard) -> subprocess.Popen[bytes]:
    instructions = {"store": str(store), "rank": share.rank, "ranks": share.ranks, "parent": os.getpid()}
    places = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.models.parallel.rank", json.dumps(instructions)],
        stdin=subprocess.PIPE,
        stdout=2,  # rank 0's output is reserved for answers
        env={**os.environ, "PYTHONPATH": places},
        start_new_session=True,  # only rank 0 handles Ctrl-C
        creationflags=SUSPENDED | getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
    )


def _end(process: subprocess.Popen[bytes], orderly: bool) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_TIMEOUT if orderly else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tell_to_end(ranks: Ranks) -> None:
    with suppress(RuntimeError):  # gloo's, if ranks are gone
        ranks.broadcast_numbers(as_numbers([Step(Op.END)]))


def _how(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def launched_share() -> ModelShard | None:
    """This process's rank if a launcher has started it, else None."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    return ModelShard(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def check_launched(ranks: int) -> ModelShard | None:
    """``launched_share``. Raises ParameterError if the launcher's number of ranks differs."""
    share = launched_share()
    if share is not None and share.ranks != ranks:
        allowed = f"{share.ranks}, which is WORLD_SIZE: the launcher that started this process decides"
        raise ParameterError("tensor_parallel", ranks, allowed)
    return share


def interface_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """The network interface that launched ranks listen on; None: 127.0.0.1. Raises ParameterError if it must be set."""
    named = environment.get("GLOO_SOCKET_IFNAME")
    if named is None and environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        allowed = "the network interface that ranks on several machines listen on, such as eth0 (no encryption)"
        raise ParameterError("GLOO_SOCKET_IFNAME", None, allowed)
    return named


def lead(
    source: Source, share: ModelShard, options: ModelOptions, threads: int, nodes: Sequence[Sequence[Node]] = ()
) -> LeadingPart | LeadingNative:
    """Rank 0's part of a model, with the other ranks ready. nodes: the NUMA nodes of each rank.

    Raises what ``load_shard`` raises, or RankError if another rank could not start.
    """
    launched = check_launched(share.ranks) is not None
    path = check_shardable(source, share)
    spec = description_of(path)
    assert spec is not None, "check_shardable refuses other families"
    on_kernels = _runs_on_kernels(spec, str(path), options, share.ranks)
    settings = Settings(
        _for_every_rank(source),
        str(options.dtype).removeprefix("torch."),
        str(options.device),
        threads,
        options.quantization,
        [[(node.number, node.cpus) for node in of_rank] for of_rank in nodes] if on_kernels else (),
    )
    settings.check(share.ranks)
    with new_exchange(spec, share.ranks) if on_kernels else nullcontext() as exchange:
        processes = Launched(_launchers_store()) if launched else Spawned(share.ranks)
        try:
            return _lead(processes, share, replace(settings, exchange=exchange), launched)
        except BaseException:
            processes.end(None, orderly=False)
            raise


def _for_every_rank(source: Source) -> str:
    """The source by which ranks find the model whatever their working directories."""
    path = Path(name_of(source)).expanduser()
    return str(path.absolute()) if path.exists() else name_of(source)


def ranks_here(ranks: int) -> int:
    """Number of the model's ranks that run on this machine."""
    return ranks if launched_share() is None else int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _runs_on_kernels(spec: DecoderSpec, name: str, options: ModelOptions, ranks: int) -> bool:
    """Whether the CPU kernels run the ranks' parts. Raises ParameterError if they were asked for and do not."""
    reason = why_not_on_kernels(spec, name, options)
    if reason is None and ranks_here(ranks) < ranks:
        reason = "ranks on the CPU kernels exchange activations in the memory of one machine"
    if reason is not None and options.quantization is not None:
        raise ParameterError("quantization", options.quantization, f"None with several ranks here: {reason}")
    if reason is not None and options.attention == "native":
        raise ParameterError("attention", "native", f"'auto' with several ranks here: {reason}")
    return reason is None


def _lead(
    processes: Spawned | Launched, share: ModelShard, settings: Settings, launched: bool
) -> LeadingPart | LeadingNative:
    store, device = processes.store, settings.device_of(0)
    store.set("settings", json.dumps(asdict(settings)))
    interface = interface_of() if launched else None
    model: LeadingPart | LeadingNative
    if settings.exchange is not None:
        with pinned(settings.nodes_of(0)):  # pages lie where they are written, even if the system binds none
            model = settings.native_part(LeadingNative, share)
        _wait_for(store, processes, share)
        model.follow(Ranks(store, share, device, interface), processes)
    else:
        config, weights = load_shard(settings.source, share, dtype=settings.torch_dtype, device=device)
        _wait_for(store, processes, share)
        ranks = Ranks(store, share, device, interface)
        model = LeadingPart(config, weights, settings.source, ranks, processes)
    weakref.finalize(model, processes.end, model.ranks, orderly=True)  # also when this process ends
    processes.watch(partial(_on_rank_ended, weakref.ref(model), model.ranks))
    return model


def _on_rank_ended(model: weakref.ref[LeadingPart | LeadingNative], ranks: Ranks) -> None:
    """Report that a rank has ended. NCCL would wait for it without end; gloo notices by itself."""
    if ranks.device.type == "cuda":
        ranks.abort()
    if (alive := model()) is not None:
        alive.on_rank_ended()


def _wait_for(store: Store, processes: RankProcesses, share: ModelShard) -> None:
    """Wait until all ranks have loaded their parts. Raises RankError if one could not."""
    waited = set(range(1, share.ranks))
    while waited:
        waited -= {rank for rank in waited if store.check([f"ready/{rank}"])}
        for rank in waited:
            if store.check([f"failed/{rank}"]):
                raise RankError(f"rank {rank} could not start: {store.get(f'failed/{rank}').decode()}")
        if waited and (ended := processes.find_ended()):
            raise RankError(f"{ended} before it was ready; see stderr")
        time.sleep(_LOOK)
    store.set("go", "")


def serve(store: Store, share: ModelShard, interface: str | None = None, place: int | None = None) -> None:
    """Run a rank other than 0 until rank 0 ends it. place: its number among the ranks of its machine."""
    store.set_timeout(FOREVER)
    try:
        settings = Settings(**json.loads(store.get("settings")))
        device, nodes = settings.device_of(share.rank if place is None else place), settings.nodes_of(share.rank)
        torch.set_num_threads(settings.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with pinned(nodes), kernel_threads(settings.threads, nodes):
            follower = _follower_of(settings, share, device)
    except Exception as error:
        store.set(f"failed/{share.rank}", f"{type(error).__name__}: {error}")
        raise
    store.set(f"ready/{share.rank}", "")
    store.wait(["go"])
    with kernel_threads(settings.threads, nodes):
        follower(Ranks(store, share, device, interface)).run()


def _follower_of(settings: Settings, share: ModelShard, device: torch.device) -> Callable[[Ranks], Follower]:
    """Load a rank's part -> what makes it follow."""
    if settings.exchange is not None:
        return partial(NativeFollower, settings.native_part(NativePart, share))
    config, weights = load_shard(settings.source, share, dtype=settings.torch_dtype, device=device)
    return lambda ranks: TorchFollower(PartOfModel(config, weights, settings.source, ranks))


def serve_if_launched(ranks: int) -> None:
    """Under a launcher: a rank other than 0 serves rank 0 and then exits here. Raises ParameterError, SystemExit."""
    share = check_launched(ranks)
    if share is not None and share.rank > 0:
        _serve_and_exit(share)


def _serve_and_exit(share: ModelShard) -> NoReturn:
    place = int(os.environ.get("LOCAL_RANK", share.rank))
    serve(_launchers_store(), share, interface_of(), place)
    raise SystemExit(0)


def _launchers_store() -> Store:
    """The launcher's store. Raises ParameterError for a second model: the other ranks serve the first one."""
    store: Store = next(rendezvous("env://"))[0]
    store = PrefixStore("paceline", store)
    if int(os.environ["RANK"]) == 0 and store.add("leaders", 1) > 1:
        allowed = "used by only one LLM in a script under torchrun: the other ranks serve the first one"
        raise ParameterError("tensor_parallel", os.environ["WORLD_SIZE"], allowed)
    return store
