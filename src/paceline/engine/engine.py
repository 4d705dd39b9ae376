"""The engine: requests go in, tokens come out, one round per step."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams
from paceline.core.acceptance import make_rule
from paceline.core.batch import Batch, RowStart
from paceline.core.cpus import Node
from paceline.core.draft import Verdict
from paceline.core.hardware import Stopwatch, ignore_torch_context, torch_threads
from paceline.core.outputs import RequestOutput
from paceline.core.values import DeviceAcceptance
from paceline.engine.assembly import Assembly, Models, check_attention, drafts_alone, max_model_len
from paceline.engine.cache_dtype import cache_dtype
from paceline.engine.chunks import PrefillChunker, PromptSlice
from paceline.engine.costs import RoundCosts
from paceline.engine.description import EngineDescription
from paceline.engine.memory import fit_memory, plan_memory
from paceline.engine.request import Intake, Request
from paceline.engine.rounds.choice import RoundChoice, why_no_graph
from paceline.engine.rounds.device_drafters import device_drafter
from paceline.engine.rounds.device_round import DeviceRound
from paceline.engine.rounds.graph import GraphPlace
from paceline.engine.rounds.kernels import KernelsPlace, NativeRound
from paceline.engine.rounds.loop import RoundLoop
from paceline.engine.rounds.program import RoundProgram
from paceline.engine.rounds.round import Speculation
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequences import Sequence as Row
from paceline.engine.slot_allocator import SlotAllocator
from paceline.engine.stores import open_answers, open_prefixes
from paceline.engine.threads import engine_threads, nodes_of_rank
from paceline.errors import ParameterError
from paceline.kernels.cpu import cpu_ops
from paceline.kernels.gpu import ahead
from paceline.kernels.native import kernel_threads
from paceline.lengths import FixedLength, LengthPolicy, PolicyInputs, make_policy
from paceline.lengths.calibration import Grid, ProgressBar
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Identity
from paceline.models.base import FlatModel
from paceline.models.decoding.decoder import Decoder

__all__ = ["Engine", "Models", "Request"]

_POLL = 0.001  # seconds between two looks at whether a measured pass has ended

AnyPolicy = TypeVar("AnyPolicy", bound=LengthPolicy)


class Engine:
    """Decodes all requests in one ragged batch.

    Not thread-safe: one thread calls ``add`` and ``step``.

    Raises CapacityError if the rows and lengths that ``config`` asks for do not fit into memory.
    Raises ParameterError if the configuration does not fit the models.
    """

    @ignore_torch_context
    @torch.inference_mode(False)  # tensors are written inside and outside of a caller's inference mode
    def __init__(self, models: Models, config: EngineConfig) -> None:
        self.models = models
        config = config.resolved(draft_model=models.draft is not None, alone=drafts_alone(models, config))
        check_attention(models, config)
        self._fitted = fit_memory(models.target, models.draft, config, max_model_len(models, config))
        self.config = config = replace(config, max_batch_size=self._fitted.rows)
        self.max_model_len, self.room = self._fitted.positions, self._fitted.budget
        self._on_kernels = isinstance(models.target, FlatModel)  # stored: the check of a protocol takes 20 us
        self.nodes = self._chosen_nodes()
        self.threads = engine_threads(config, models.target, self.nodes)
        self._ids = itertools.count()
        self._requests: dict[str, RequestOutput] = {}
        self.last_verdict: Verdict | None = None  # of the last step; None if it ran no round
        self._assembly = Assembly(models, config, self.room.slots, self.max_model_len, self._fitted.pool)
        target = self._assembly.target()
        adapters = () if target.adapters is None else target.adapters.names
        self._intake = Intake(
            config, models.target.vocab_size, self.max_model_len, models.eos_token_ids, adapters, models.embeds_only
        )
        drafter = self._assembly.drafter(target)
        if drafter.reader is not None:
            target.attach_reader(drafter.reader)
        self.parts = Speculation(target, drafter, FixedLength(0), make_rule(config.acceptance))
        self.batch = self._new_batch()
        self._device_round = self._make_device_round()
        self._description = EngineDescription(
            models, config, self.parts, self._device_round, self.threads, self.nodes, self._fitted
        )
        self._costs = RoundCosts(self._description, self.room, self._own_threads)
        self.use_policy(self._policy())
        self.chunks = PrefillChunker(config.prefill_chunk, config.longest_pause)
        self._answer_file = open_answers(self._description)
        self.slots = SlotAllocator(self.batch, self.parts, self.room, open_prefixes(self._description, self.room))
        self.scheduler = Scheduler(self.batch, self.parts, self.slots, self.chunks)
        self._graph = self._make_graph()
        graphs = [] if self._graph is None else [self._graph, self._graph.masked()]
        choice = RoundChoice(self.parts, self._make_kernels(), graphs)
        self.rounds = RoundLoop(self.parts, self.scheduler, choice)
        if models.target.device.type == "cuda" and config.longest_pause is not None:
            self.measure_prefill()

    def _chosen_nodes(self) -> tuple[Node, ...]:
        """Return the NUMA nodes of the CPU kernels. Raises ParameterError if they are named, but not used."""
        numa = self.config.numa
        if self._on_kernels:
            return nodes_of_rank(self.config)
        if numa in ("auto", "off"):
            return ()
        raise ParameterError("numa", numa, "'auto' or 'off': the target does not run on the CPU kernels")

    def _new_batch(self) -> Batch:
        target, room = self.models.target, self.room
        ops = cpu_ops(target.device)
        return Batch(room.slots, room.positions, target.vocab_size, target.device, ops, room.rows)

    def _make_graph(self) -> GraphPlace | None:
        """Return the place of device rounds; None if all rounds run on the host."""
        device_round = self._device_round
        if device_round is None or not self._uses_device_rounds():
            return None
        return GraphPlace(device_round, self.parts, self.scheduler)

    def _make_kernels(self) -> KernelsPlace | None:
        """Return the place of rounds on the CPU kernels; None if they do not run the target's."""
        native = NativeRound.of(self.parts.target, self.batch, self.parts.accept, self.threads)
        return None if native is None else KernelsPlace(self.parts, native)

    def _make_device_round(self) -> DeviceRound | None:
        """Return the round as a program of the device; None if all rounds run on the host."""
        config, parts = self.config, self.parts
        if not self._uses_device_rounds():
            return None
        draft = parts.drafter.decoders[0] if parts.drafter.decoders else None
        rule = DeviceAcceptance(independent=config.acceptance == "rejection", synthetic=config.synthetic_acceptance)
        width, copies = parts.drafter.width, parts.drafter.copies
        drafter = device_drafter(parts.target, draft, self.batch, width=width, copies=copies)
        return DeviceRound(RoundProgram(parts.target, drafter, self.batch, rule))

    def _uses_device_rounds(self) -> bool:
        """Whether rounds run on the device. The length policy is checked once it exists.

        Raises ParameterError if rounds="device" was chosen and is not possible.
        """
        rounds, obstacle = self.config.rounds, why_no_graph(self.parts)
        if rounds == "device" and obstacle is not None:
            raise ParameterError("rounds", "device", f"not possible here: {obstacle}; 'host' is")
        one_gpu = self.models.target.device.type == "cuda" and self.config.tensor_parallel == 1
        chosen = rounds == "device" or (rounds == "auto" and one_gpu)
        return chosen and obstacle is None

    def _policy(self) -> LengthPolicy:
        """Return the length policy; without a drafter it is a fixed length of 0."""
        config, drafter = self.config, self.parts.drafter
        means = PolicyInputs(
            self._costs.table,
            self._costs.profile,
            drafter.decoders,
            ragged=self._on_kernels,
            copies=drafter.copies,
            device=self._device_round,
            paying_rows=drafter.paying_rows,
        )
        return make_policy(config.num_speculative_tokens if config.draft_tokens else 0, means)

    @ignore_torch_context
    def measure_costs(self, grid: Grid, progress: ProgressBar = iter) -> CostTable:
        """Measure the cost of rounds with these models; only while the engine is idle. All cached prefixes are lost."""
        self.slots.forget()
        try:
            return self._costs.measure(grid, progress)
        finally:
            self.slots.forget()  # frees what the measured rows held

    @ignore_torch_context
    @torch.inference_mode()
    def measure_prefill(self) -> None:
        """Time a chunk of a prompt, by which the first chunks are sized; only while the engine is idle.

        A GPU reads a chunk in milliseconds, of which an assumed time per token would make many small ones.
        """
        target, size = self.parts.target, min(self.config.prefill_chunk, self.max_model_len - 1)
        self.slots.forget()
        self.batch.set_row(0, RowStart([0] * size, SamplingParams(), 0))
        target.prefill(self.batch, [0], [0], [size])  # compiles kernels
        timer = Stopwatch(target.model.device)
        target.prefill(self.batch, [0], [0], [size])
        timer.stop()
        while (seconds := timer.seconds()) is None:
            time.sleep(_POLL)
        self.chunks.speed.learn([PromptSlice(0, 0, size)], seconds)
        target.cut_row(0, 0)
        self.batch.free_slot(0, 0)

    def clear_answers(self) -> None:
        """Forget all answers that n-gram lookup holds, also the file of them in ``lookup_dir``."""
        if (answers := self.parts.drafter.answers) is not None:
            answers.clear()
        if self._answer_file is not None:
            self._answer_file.clear()

    @ignore_torch_context
    @torch.inference_mode()
    def close(self) -> None:
        """End all requests, write all prefixes to ``prefix_dir`` and all answers to ``lookup_dir``.

        The engine cannot be used afterwards.
        """
        for request_id in list(self._requests):
            self.abort(request_id)
        if self._answer_file is not None:
            self._answer_file.close()
        if self.slots.stored is not None:
            self.slots.stored.close()
        self.clear()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the models take, with caches that are as full as their limit allows."""
        models = self.models
        plan = plan_memory(models.target, models.draft, self.config, self._fitted.rows, self.max_model_len)
        return plan.weights + plan.to_allocate - plan.caches + self.room.limit

    def identity(self) -> Identity:
        """Return the key of profiles and cost tables: they hold only for an engine with an equal identity."""
        return self._description.identity()

    def describe(self) -> str:
        """Return one line that says what runs, and why a faster path does not."""
        return self._description.describe(self.rounds, self.scheduler.describe(), self.slots.describe())

    @ignore_torch_context
    @torch.inference_mode()
    def capture_ahead(
        self, seconds: float, progress: ahead.Progress = iter, rows: int | None = None
    ) -> ahead.Ahead | None:
        """Capture the rounds that requests will need, the likeliest first; only while the engine is idle.

        It stops after about ``seconds``, or when memory runs short. Other rounds are captured when they are first
        needed.
        Returns None if this engine captures no rounds.

        progress: may wrap the list of programs in a progress bar. rows: the most that will decode at once; None: all.
        """
        assert not self.busy, "requests would wait for captures"
        if self._graph is None:
            return None
        with self._own_threads():
            return self._graph.capture_ahead(seconds, progress, rows)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def use_policy(self, policy: AnyPolicy) -> AnyPolicy:
        """Let another length policy choose from the next round on, and return it. It knows nothing of present rows."""
        self.parts.policy = policy
        return policy

    def expect(self, *, final: bool | None = None, watched: bool | None = None) -> None:
        """Say what callers do with results, which changes only the order of work. None leaves a statement as it is.

        final: whether no caller reads results before they end, and no requests will come before the present ones have
            ended. At first they may.
        watched: whether a caller reads results before they end; other requests may come in any case. At first it does.
        """
        self.scheduler.final = self.scheduler.final if final is None else final
        self.scheduler.watched = self.scheduler.watched if watched is None else watched

    def add(self, request: Request) -> RequestOutput:
        """Queue a request and return its result, which ``step`` fills.

        Raises EmptyPromptError, PromptTooLongError or ParameterError. Other requests are not affected.
        """
        self.check(request)
        unused = (name for number in self._ids if (name := f"request-{number}") not in self._requests)
        request_id = request.request_id or next(unused)
        if request_id in self._requests:
            raise ParameterError("request_id", request_id, "not the id of a request that still runs")
        output, rows = self._intake.begin(request, request_id)
        self._requests[request_id] = output
        self.scheduler.waiting.extend(rows)
        return output

    def check(self, request: Request) -> None:
        """Raise what ``add`` would raise. May be called from any thread."""
        self._intake.check(request)

    @ignore_torch_context
    def step(self) -> list[RequestOutput]:
        """Admit requests, prefill one chunk, run one round. Return the requests that gained tokens or ended."""
        if self._skips_torch():
            with kernel_threads(self.threads, self.nodes):
                return self._step()
        with torch.inference_mode(), self._own_threads():
            return self._step()

    def _skips_torch(self) -> bool:
        """Whether the step is only a round of the CPU kernels. Then torch's modes need not be set, which takes 80
        us.
        """
        if self.scheduler.prefilling or self.scheduler.admissible:
            return False
        kernels = self.rounds.choice.kernels
        return kernels is not None and not kernels.needs_torch(self.batch)

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """Set the CPU threads. Beside the CPU kernels torch gets one: its idle threads would spin on the kernels'
        cores.
        """
        with torch_threads(1 if self._on_kernels else self.threads), kernel_threads(self.threads, self.nodes):
            yield

    def _step(self) -> list[RequestOutput]:
        self.last_verdict = None
        changed = self.scheduler.admit()
        waits = any(not row.output.finished for row in changed)  # a first token is delivered before the next round
        if (rows := len(self.scheduler.running)) and not waits:
            self.batch.draining = self.scheduler.draining
            started = time.perf_counter()
            changed += self.rounds.step()
            self.last_verdict = self.rounds.last_verdict
            self.chunks.rounds.learn(rows, time.perf_counter() - started)
        if not self.busy:
            self.rounds.forget()
            self.scheduler.check_integrity()
        return self._collect(changed)

    @ignore_torch_context
    @torch.inference_mode()
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its rows. Return its result; None if there is no such request."""
        output = self._requests.get(request_id)
        self._collect(self.scheduler.drop(request_id, "abort"))
        return output

    @ignore_torch_context
    def clear(self) -> None:
        """End all requests; also after an exception or Ctrl-C in the middle of a round."""
        self.scheduler.clear()
        self.rounds.forget()
        for output in self._requests.values():  # after an interrupt a sequence may be in none of the queues
            for answer in output.candidates:
                answer.finish_reason = answer.finish_reason or "abort"
            output.close()
        self._requests.clear()

    def clear_begun(self) -> list[RequestOutput]:
        """End the requests that have a row, after an exception in a round; waiting requests stay queued. Return the
        ended ones.
        """
        waiting = Counter(row.request_id for row in self.scheduler.waiting)
        begun = {name for name, output in self._requests.items() if waiting[name] < len(output.candidates)}
        ended = [self._requests[name] for name in begun]
        untouched = {name: output for name, output in self._requests.items() if name not in begun}
        queue = [row for row in self.scheduler.waiting if row.request_id in untouched]
        self.scheduler.waiting.keep(row for row in self.scheduler.waiting if row.request_id in begun)
        self._requests = {output.request_id: output for output in ended}
        self.clear()
        self.scheduler.waiting.extend(queue)
        self._requests.update(untouched)
        return ended

    def _collect(self, changed: list[Row]) -> list[RequestOutput]:
        ids = dict.fromkeys(row.request_id for row in changed)
        outputs = [self._requests[request_id] for request_id in ids]
        for output in outputs:
            if output.finished:
                output.close()
                del self._requests[output.request_id]
                if self._answer_file is not None:
                    self._answer_file.answer_ended()
        return outputs

    @ignore_torch_context
    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the target's logits [V] after these tokens, from one plain forward pass with a cache of its own."""
        model = self.models.target
        kv_dtype = cache_dtype(model, self.config)
        decoder = Decoder(model, self._assembly.backend(), 1, len(token_ids), model.vocab_size, kv_dtype)
        tokens = torch.tensor([list(token_ids)], device=model.device)
        with self._own_threads():
            hidden = decoder.forward(tokens, tokens.new_zeros(1), len(token_ids))
            return decoder.logits(hidden[:, -1])[0]
