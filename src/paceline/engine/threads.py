"""The number of an engine's CPU threads, and the NUMA nodes between which they and the weights are divided."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable, Iterator

import torch

from paceline.config import EngineConfig
from paceline.core import cpus
from paceline.core.hardware import threads_per_rank
from paceline.errors import ParameterError
from paceline.kernels import abi, native
from paceline.models.base import AnyModel
from paceline.models.native.model import NativeModel

log = logging.getLogger("paceline")

_MEASURED_ABOVE = 8  # threads: up to here every one more has made passes faster
_WORTH = 1.03  # more threads must make a pass this much faster: they take time from others
_PASSES = 3  # the fastest counts


_Product = tuple[abi.CLinear, torch.Tensor, torch.Tensor]  # a layer, an input row, an output row


def engine_threads(config: EngineConfig, target: AnyModel, nodes: tuple[cpus.Node, ...]) -> int:
    """Number of threads: the one that was asked for, else one per core, or fewer if the target is then as fast.

    Warns if that is more than the process may use.
    """
    ranks = _ranks_here(config.tensor_parallel)
    if config.threads is not None:
        usable = len(cpus.usable_cpus())
        if config.threads * ranks > usable:
            log.warning(
                "threads=%d%s, but this process may use %d CPUs: threads then wait for others that do not run. Lower "
                "threads, or leave it out",
                config.threads,
                f" in each of {ranks} ranks" if ranks > 1 else "",
                usable,
            )
        return config.threads
    most = threads_per_rank(ranks)
    if most <= _MEASURED_ABOVE or not isinstance(target, NativeModel):
        return most
    candidates = [most]
    while candidates[-1] // 2 >= _MEASURED_ABOVE:
        candidates.append(candidates[-1] // 2)
    return fewest_threads({threads: pass_seconds(target, threads, nodes) for threads in candidates})


def _ranks_here(ranks: int) -> int:
    if ranks == 1:
        return 1
    from paceline.models.parallel.launch import ranks_here  # torch.distributed is slow to import

    return ranks_here(ranks)


def fewest_threads(seconds: dict[int, float]) -> int:
    """The smallest number of threads that is about as fast as the fastest. seconds: of a pass, by number of threads."""
    return min(threads for threads, took in seconds.items() if took <= _WORTH * min(seconds.values()))


def pass_seconds(model: NativeModel, threads: int, nodes: tuple[cpus.Node, ...] = ()) -> float:
    """Seconds of all products of one token with a model's dense layers, on threads of its own."""
    kernels = native.required()
    products = [_product(linear) for linear in _linears(model.packed_decoder.model)]
    pool = native.Pool(kernels.library, threads, nodes)
    try:
        return min(_walk_seconds(kernels, pool, products) for _ in range(_PASSES))
    finally:
        pool.end()


def _walk_seconds(kernels: native.Kernels, pool: native.Pool, products: Iterable[_Product]) -> float:
    began = time.perf_counter()
    for linear, x, out in products:
        address = ctypes.addressof(linear)
        kernels.library.pl_linear(kernels.handle, pool.handle, address, x.data_ptr(), 1, 0, out.data_ptr(), out.numel())
    return time.perf_counter() - began


def _product(linear: abi.CLinear) -> _Product:
    return linear, torch.zeros(linear.inputs), torch.empty(linear.outputs)


def _linears(model: abi.CModelSpec) -> Iterator[abi.CLinear]:
    for index in range(model.layer_count):
        layer = model.layers[index]
        of_states = [layer.recurrent.contents.first, layer.recurrent.contents.second] if layer.recurrent else []
        for linear in (layer.qkv, layer.attention_out, *of_states, layer.gate_up, layer.down):
            if linear.weights:
                yield linear


def nodes_of_rank(config: EngineConfig, rank: int = 0) -> tuple[cpus.Node, ...]:
    """The NUMA nodes of a rank: its share of ``chosen_nodes``.

    Where there are more ranks than nodes, several share one, and each has some of its CPUs: a rank whose threads wake
    on the CPU of another would take its time.
    """
    chosen, ranks = chosen_nodes(config.numa), config.tensor_parallel
    if ranks == 1 or config.numa == "off":
        return chosen
    chosen = chosen or cpus.nodes()
    first, last = (len(chosen) * edge // ranks for edge in (rank, rank + 1))
    if len(chosen) >= ranks or not chosen:
        return chosen[first:last]
    sharing = [other for other in range(ranks) if len(chosen) * other // ranks == first]
    return (cpus.part_of(chosen[first], sharing.index(rank), len(sharing)),)


def chosen_nodes(numa: str) -> tuple[cpus.Node, ...]:
    """The NUMA nodes that ``EngineConfig.numa`` names; empty: the system places threads and weights.

    "auto" is all nodes if there are several. Raises ParameterError for a node without CPUs that this process may use.
    """
    if numa == "off":
        return ()
    nodes = {node.number: node for node in cpus.nodes()}
    if numa == "auto":
        return tuple(nodes.values()) if len(nodes) > 1 else ()
    numbers = [int(number) for number in numa.split(",")]
    for number in numbers:
        if number not in nodes:
            known = cpus.ranges(nodes) or "none"
            raise ParameterError("numa", numa, f"nodes with CPUs that this process may use: {known}")
    return tuple(nodes[number] for number in dict.fromkeys(numbers))
