"""The training loop: AdamW steps, atomic checkpoints, evaluations on held-out conversations."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.config import DraftTraining
from paceline.config.files import written_whole
from paceline.core.hardware import native_bfloat16
from paceline.errors import PacelineError
from paceline.tools.training.acceptance import Acceptance, measure
from paceline.tools.training.batches import ExampleDataset, TrainingBatch
from paceline.tools.training.objective import Divergence, Learner, Objective, loss
from paceline.tools.training.ranks import TrainingRanks

_BETAS = 0.9, 0.95
_CHECKPOINT_BYTES_PER_WEIGHT = 12  # a float32 weight and its two moments
_LOGITS_COPIES = 4  # tensors of the logits' size that one draft token needs: logits, distributions, gradients


@dataclass
class Progress:
    """The state of a training run, saved in each checkpoint.

    step: index within the epoch. passes: tokens seen so far. seconds, cpu_seconds: training time, and that of all
        threads of this process, earlier runs included.
    losses: the first draft token's loss, for each step. looks: evaluations, each with ``passes`` and ``seconds``.
    """

    epoch: int = 0
    step: int = 0
    passes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains a head on ``dataset`` and evaluates it on ``held_out``.

    scale [S]: factors for the hidden states, see ``scale_for``. seed: determines the order of the conversations.
    ranks: the processes that train together; rank 0 evaluates and saves. By default this process trains alone.
    """

    def __init__(
        self,
        head: Learner,
        dataset: ExampleDataset,
        held_out: ExampleDataset,
        scale: Tensor,
        options: DraftTraining,
        seed: int,
        ranks: TrainingRanks | None = None,
    ) -> None:
        self.ranks = ranks or TrainingRanks()
        self.head, self.dataset, self.held_out, self.options, self.seed = head, dataset, held_out, options, seed
        self.scale = scale
        self.progress = Progress()
        self._trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=options.learning_rate, betas=_BETAS)
        self._autocast = torch.autocast(
            scale.device.type, torch.bfloat16, enabled=native_bfloat16(scale.device), cache_enabled=True
        )

    @property
    def fraction_done(self) -> float:
        """Fraction of the training that is done, from 0 to 1."""
        options, progress = self.options, self.progress
        if options.minutes is not None:
            return min(1.0, progress.seconds / (60 * options.minutes))
        return min(1.0, progress.passes / (options.epochs * self.dataset.tokens))

    def run(self, checkpoint: Path, on_step: Callable[[], None] = lambda: None) -> None:
        """Train to the end, from the checkpoint if it exists. on_step: called after every step, on rank 0."""
        if checkpoint.exists():
            self.load(checkpoint)
        evaluate, save = _Every(self.options.evaluate_every), _Every(self.options.checkpoint_every)
        batches = self._batches()
        mark, cpu_mark = time.monotonic(), time.process_time()
        while self.fraction_done < 1:
            self._train_step(*next(batches))
            now, cpu_now = time.monotonic(), time.process_time()
            seconds = self.ranks.total(now - mark) / self.ranks.size  # equal on all ranks, so that all end together
            self.progress.seconds, mark = self.progress.seconds + seconds, now
            self.progress.cpu_seconds, cpu_mark = self.progress.cpu_seconds + cpu_now - cpu_mark, cpu_now
            if not self.ranks.first:
                continue
            on_step()
            if evaluate.due():
                self.evaluate()
            if save.due():
                self.save(checkpoint)
        if self.ranks.first:
            if not self.progress.looks or self.progress.looks[-1]["passes"] < self.progress.passes:
                self.evaluate()
            self.save(checkpoint)

    def _batches(self) -> Iterator[tuple[list[int], TrainingBatch]]:
        """Yield the remaining steps, epoch after epoch, each with the batch of this rank's part.

        A rank without a part of a step gets one conversation, whose gradients ``_train_step`` multiplies by 0.
        """
        progress = self.progress
        while True:
            steps = self.dataset.epoch(progress.epoch, self.seed, self.options.batch_tokens)
            remaining = steps[progress.step :]
            parts = [self.ranks.part(step) or step[:1] for step in remaining]
            yield from zip(remaining, self.dataset.batches(parts), strict=True)
            progress.epoch, progress.step = progress.epoch + 1, 0

    def _train_step(self, step: list[int], batch: TrainingBatch) -> None:
        """Train on one step, of which ``batch`` is this rank's part."""
        options, progress, batch = self.options, self.progress, batch.to(self.scale.device)
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * schedule(self.fraction_done, options.warm_up)
        with self._autocast, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # norms stay in float32
            objective = self._objective()
            counts = self.dataset.counts(step, len(objective.weights), self.head.stride, objective.offset)
            total, first = loss(self.head, batch, self.scale, objective, counts)
        has_part = float(len(self.ranks.part(step)) > 0)
        first = self.ranks.total(first * has_part)
        if not math.isfinite(first):
            raise PacelineError(
                f"training diverged at step {len(progress.losses)}: take a lower --learning-rate with --resume, which "
                "keeps the data, after removing training.safetensors if it is there"
            )
        self._optimizer.zero_grad()
        (total * has_part).backward()  # type: ignore[no-untyped-call]
        self.ranks.all_reduce([weight.grad for weight in self._trained.values() if weight.grad is not None])
        torch.nn.utils.clip_grad_norm_(self._trained.values(), options.clip)
        self._optimizer.step()
        progress.losses.append(round(first, 5))
        progress.step += 1
        progress.passes += sum(self.dataset.lengths[index] for index in step)

    def _objective(self) -> Objective:
        """The objective at this point of the training. Its offset moves by one position with every epoch."""
        options, done = self.options, self.fraction_done
        steps = self.head.trained_steps(options.unroll, done < options.alone)
        weights = [options.decay**step for step in range(steps)]
        divergence: Divergence = "total_variation" if done >= 1 - options.total_variation else "kl"
        return Objective(weights, divergence, self.progress.epoch % self.head.stride)

    def evaluate(self) -> Acceptance:
        """Measure acceptance on the held-out conversations, and add it to ``progress``."""
        acceptance = measure(self.head, self.held_out, self.scale, self.options.batch_tokens, self._autocast)
        progress = self.progress
        progress.looks.append({"passes": progress.passes, "seconds": progress.seconds, **asdict(acceptance)})
        return acceptance

    def save(self, path: Path) -> None:
        """Write weights, optimizer state and ``progress`` atomically."""
        tensors = {f"weight.{name}": weight.detach().cpu() for name, weight in self._trained.items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value.detach().cpu() for name, value in state.items()}
        with written_whole(path) as part:
            save_file(tensors, part, metadata={"progress": json.dumps(asdict(self.progress))})

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote. Raises PacelineError if the file is broken or belongs to another head."""
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                self.progress = Progress(**json.loads(file.metadata()["progress"]))
            with torch.no_grad():
                for name, weight in self._trained.items():
                    weight.copy_(tensors[f"weight.{name}"])
            self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": _by_index(tensors)})
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise PacelineError(f"{path} is no checkpoint of this head: remove it to begin again ({error})") from error

    @torch.no_grad()
    def finished(self) -> Learner:
        """A bfloat16 copy of the head on the CPU that takes unscaled hidden states."""
        head = deepcopy(self.head).cpu()
        head.absorb(self.scale.cpu())
        return head.bfloat16()


class _Every:
    """A timer that becomes due every ``minutes``."""

    def __init__(self, minutes: float) -> None:
        self._seconds, self._last = 60 * minutes, time.monotonic()

    def due(self) -> bool:
        """Return whether the interval has passed, and if so start the next one."""
        due = time.monotonic() - self._last >= self._seconds
        if due:
            self._last = time.monotonic()
        return due


def _by_index(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        index, _, moment = rest.partition(".")
        if kind == "optimizer":
            state.setdefault(int(index), {})[moment] = tensor
    return state


def schedule(done: float, warm_up: float) -> float:
    """The learning rate as a fraction of its maximum: linear warm-up, then cosine decay.

    done: fraction of the training that is done. warm_up: fraction at which the warm-up ends.
    """
    if done < warm_up:
        return max(done / warm_up, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (done - warm_up) / max(1e-9, 1 - warm_up)))


def scale_for(head: Learner, dataset: ExampleDataset) -> Tensor:
    """[S]: factors for the hidden states that this head reads; 1 for a head that needs their own scale."""
    scale = _unit_scale(dataset)
    return scale if head.at_any_size else torch.ones_like(scale)


def _unit_scale(dataset: ExampleDataset) -> Tensor:
    """[S]: the reciprocal of each hidden state's median RMS over tokens, in the first 64 conversations.

    Unscaled hidden states are tens of times as large as an embedding, and stall training.
    """
    sizes = [dataset[i].features.float().square().mean(-1).sqrt() for i in range(min(64, len(dataset)))]
    return 1 / torch.cat(sizes).median(0).values.clamp(min=1e-6)


def trained_weights(head: Learner) -> int:
    """Number of trained weights; weights copied from the target and frozen do not count."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


def training_bytes(head: Learner, options: DraftTraining) -> int:
    """Bytes of memory for training: the head, its gradients and moments, the logits of a step.

    The data and the target are not included.
    """
    trained = trained_weights(head)
    weights: int = sum(tensor.numel() for tensor in head.state_dict().values())
    logits = options.batch_tokens * head.lm_head.out_features
    return 4 * (weights + 3 * trained + (1 + _LOGITS_COPIES * options.unroll) * logits)


def checkpoint_bytes(head: Learner) -> int:
    """Bytes that ``Trainer.save`` writes."""
    return _CHECKPOINT_BYTES_PER_WEIGHT * trained_weights(head)
