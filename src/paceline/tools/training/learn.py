"""The loop: steps of AdamW, checkpoints that nothing can tear, looks at the held-out texts."""

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
from paceline.tools.training.objective import Divergence, Learner, loss
from paceline.tools.training.ranks import TrainingRanks

_BETAS = 0.9, 0.95
_BYTES_CHECKPOINT = 12  # of a weight and its two moments
_LOGITS_COPIES = 4  # of a step: logits, their distribution, gradients


@dataclass
class Progress:
    """How far training has come. seconds: of all sittings. losses: of every step, the first draft token's own.

    looks: at the held-out texts, each with the passes (tokens seen so far) behind it.
    """

    epoch: int = 0
    step: int = 0  # of the epoch
    passes: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains a head on ``dataset`` and looks at ``held``. seed: of the order of the texts.

    ranks: processes that learn together, of which the first looks and saves; None: this one alone.
    scale [S]: what the streams are multiplied by, see ``scale_for``.
    """

    def __init__(
        self,
        head: Learner,
        dataset: ExampleDataset,
        held: ExampleDataset,
        scale: Tensor,
        options: DraftTraining,
        seed: int,
        ranks: TrainingRanks | None = None,
    ) -> None:
        self.ranks = ranks or TrainingRanks()
        self.head, self.dataset, self.held, self.options, self.seed = head, dataset, held, options, seed
        self.scale = scale
        self.progress = Progress()
        self._learnt = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(self._learnt.values(), lr=options.learning_rate, betas=_BETAS)
        self._autocast = torch.autocast(
            scale.device.type, torch.bfloat16, enabled=native_bfloat16(scale.device), cache_enabled=True
        )

    @property
    def fraction_done(self) -> float:
        """Of all work that is done, from 0 to 1."""
        options, progress = self.options, self.progress
        if options.minutes is not None:
            return min(1.0, progress.seconds / (60 * options.minutes))
        return min(1.0, progress.passes / (options.epochs * self.dataset.tokens))

    def run(self, checkpoint: Path, told: Callable[[], None] = lambda: None) -> None:
        """From where the checkpoint ends, if there is one, to the end. told: is called after every step."""
        if checkpoint.exists():
            self.load(checkpoint)
        look, save = _Every(self.options.evaluate_every), _Every(self.options.checkpoint_every)
        batches = self._batches()
        mark = time.monotonic()
        while self.fraction_done < 1:
            self._learn(*next(batches))
            now = time.monotonic()
            lasted = self.ranks.total(now - mark) / self.ranks.size  # so that all end together
            self.progress.seconds, mark = self.progress.seconds + lasted, now
            if not self.ranks.first:
                continue
            told()
            if look.due():
                self.evaluate()
            if save.due():
                self.save(checkpoint)
        if self.ranks.first:
            self._end(checkpoint)

    def _end(self, checkpoint: Path) -> None:
        if not self.progress.looks or self.progress.looks[-1]["passes"] < self.progress.passes:
            self.evaluate()
        self.save(checkpoint)

    def _batches(self) -> Iterator[tuple[list[int], TrainingBatch]]:
        """Steps from where ``progress`` stands, epoch after epoch, and what this process learns of each."""
        progress = self.progress
        while True:
            steps = self.dataset.epoch(progress.epoch, self.seed, self.options.batch_tokens)
            left = steps[progress.step :]
            parts = [self.ranks.part(step) or step[:1] for step in left]
            yield from zip(left, self.dataset.batches(parts), strict=True)
            progress.epoch, progress.step = progress.epoch + 1, 0

    def _learn(self, step: list[int], batch: TrainingBatch) -> None:
        """One step, of which the batch is this process's part."""
        options, progress, here = self.options, self.progress, batch.to(self.scale.device)
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * schedule(self.fraction_done, options.warm_up)
        with self._autocast, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # norms stay in float32
            weights, divergence = self._asked()
            counts = self.dataset.counts(step, len(weights))
            total, first = loss(self.head, here, self.scale, weights, divergence, counts)
        mine = float(len(self.ranks.part(step)) > 0)
        first = self.ranks.total(first * mine)
        if not math.isfinite(first):
            raise PacelineError(f"training came apart at step {len(progress.losses)}: take a lower --learning-rate")
        self._optimizer.zero_grad()
        (total * mine).backward()  # type: ignore[no-untyped-call]
        self.ranks.add_up([weight.grad for weight in self._learnt.values() if weight.grad is not None])
        torch.nn.utils.clip_grad_norm_(self._learnt.values(), options.clip)
        self._optimizer.step()
        progress.losses.append(round(first, 5))
        progress.step += 1
        progress.passes += sum(self.dataset.lengths[index] for index in step)

    def _asked(self) -> tuple[list[float], Divergence]:
        """The weights of the steps of a draft, and what they are measured by."""
        options, share = self.options, self.fraction_done
        steps = options.unroll if self.head.unrolls and share >= options.alone else 1
        weights = [options.decay**step for step in range(steps)]
        return weights, "total_variation" if share >= 1 - options.total_variation else "kl"

    def evaluate(self) -> Acceptance:
        """At the held-out texts; it is noted in ``progress``."""
        found = measure(self.head, self.held, self.scale, self.options.batch_tokens, self._autocast)
        progress = self.progress
        progress.looks.append({"passes": progress.passes, "seconds": progress.seconds, **asdict(found)})
        return found

    def save(self, path: Path) -> None:
        """Weights, the optimizer's state and ``progress``, whole or not at all."""
        tensors = {f"weight.{name}": weight.detach().cpu() for name, weight in self._learnt.items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value.detach().cpu() for name, value in state.items()}
        with written_whole(path) as part:
            save_file(tensors, part, metadata={"progress": json.dumps(asdict(self.progress))})

    def load(self, path: Path) -> None:
        """Go on where ``save`` was called. Raises PacelineError for a broken file."""
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                self.progress = Progress(**json.loads(file.metadata()["progress"]))
            with torch.no_grad():
                for name, weight in self._learnt.items():
                    weight.copy_(tensors[f"weight.{name}"])
            self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": _by_index(tensors)})
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise PacelineError(f"{path} is no checkpoint of this head: remove it to begin again ({error})") from error

    @torch.no_grad()
    def finished(self) -> Learner:
        """A copy of the head that takes the streams as they are."""
        head = deepcopy(self.head).cpu()
        head.absorb(self.scale.cpu())
        return head.bfloat16()


class _Every:
    """Whether so many minutes have passed since it last said so."""

    def __init__(self, minutes: float) -> None:
        self._seconds, self._last = 60 * minutes, time.monotonic()

    def due(self) -> bool:
        due = time.monotonic() - self._last >= self._seconds
        if due:
            self._last = time.monotonic()
        return due


def _by_index(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        index, _, what = rest.partition(".")
        if kind == "optimizer":
            state.setdefault(int(index), {})[what] = tensor
    return state


def schedule(share: float, warm_up: float) -> float:
    """The learning rate's part of its highest: a line up, then half a cosine down."""
    if share < warm_up:
        return max(share / warm_up, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (share - warm_up) / max(1e-9, 1 - warm_up)))


def scale_for(head: Learner, dataset: ExampleDataset) -> Tensor:
    """[S]: what the streams are multiplied by before this head reads them."""
    usual = unit_scale(dataset)
    return usual if head.at_any_size else torch.ones_like(usual)


def unit_scale(dataset: ExampleDataset, some: int = 64) -> Tensor:
    """[S]: one over the usual size (the median token's RMS) of each stream, by the first conversations.

    At their own size, tens of times that of an embedding, they stall training.
    """
    sizes = [dataset[i].features.float().square().mean(-1).sqrt() for i in range(min(some, len(dataset)))]
    return 1 / torch.cat(sizes).median(0).values.clamp(min=1e-6)


def trained_weights(head: Learner) -> int:
    """How many weights are learnt; those of the target are not."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


def training_bytes(head: Learner, options: DraftTraining) -> int:
    """Memory that training takes beside data and target: the head, its gradients and moments, logits of a step."""
    learnt = trained_weights(head)
    held: int = sum(tensor.numel() for tensor in head.state_dict().values())
    logits = options.batch_tokens * head.lm_head.out_features
    return 4 * (held + 3 * learnt + (1 + _LOGITS_COPIES * options.unroll) * logits)


def checkpoint_bytes(head: Learner) -> int:
    """Of ``Trainer.save``."""
    return _BYTES_CHECKPOINT * trained_weights(head)
