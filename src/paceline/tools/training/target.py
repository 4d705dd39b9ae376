"""What a drafter takes from its target: embedding, output, the last norm, the shape of its layer or whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from paceline.config import DraftTraining
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.kinds import make_head
from paceline.errors import ParameterError
from paceline.models.config import ModelConfig
from paceline.models.linear import Dense
from paceline.models.loading import load_config, load_model
from paceline.models.transformer import Transformer
from paceline.tools.training.objective import Learner
from paceline.tools.training.shards import Shard
from paceline.tools.training.streams import taps_of
from paceline.tools.training.student import FAMILIES, Student, spread, student_config, usual_layers

_LEFT_OUT = "left out with --kind {kind}, whose layers are the target's"
_NATIVE = "a target of a family that paceline runs itself, whose embedding is as wide as its layers"


@dataclass(frozen=True)
class Target:
    """embedding, rows [V, width]: of tokens read and of tokens said, bfloat16. norm [width]: the last norm's weight.

    layers: the tensors of those that were asked for, as Llama's checkpoints name them; taken: which these are.
    """

    name: str
    published: PreTrainedConfig
    config: ModelConfig
    rope: dict[str, Any]
    embedding: Tensor
    rows: Tensor
    norm: Tensor | None
    layers: tuple[dict[str, Tensor], ...] = ()
    taken: tuple[int, ...] = ()

    @staticmethod
    def load(source: str, kind: str = DraftTraining.kind, layers: int | None = None) -> Target:
        """From the model's files, what a drafter of that kind takes. layers: as of ``DraftTraining``.

        Raises ParameterError for a model that no head can read, or of which no smaller one can be made; else as
        ``load_model``.
        """
        model, said = load_model(source, dtype=torch.bfloat16), load_config(source)
        if not isinstance(model, Transformer) or model.config.embed_width not in (0, model.config.width):
            raise ParameterError("MODEL", source, _NATIVE)
        embedding, head, norm = model.ends()
        assert isinstance(head, Dense), "nothing has packed it"
        taken = _taken(source, kind, model, said, layers)
        rope = getattr(said, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
        return Target(
            source, said, model.config, dict(rope), embedding, head.weight, _weight(norm),
            tuple(model.layer(index) for index in taken), taken,
        )  # fmt: skip

    def learner(self, plan: DraftTraining, taps: Sequence[int], says: Tensor, seed: int) -> Learner:
        """What is to be trained, float32. says [Vd]: the tokens that a head can say, or a draft model looks at."""
        if plan.kind != "model":
            return self.head(self.shape(taps, plan), says, seed)
        student = Student(self._student(plan), len(says))
        assert self.norm is not None, "families whose layers are taken have one"
        student.take(self.embedding, self.rows, self.norm, self.layers, says)
        return student

    def sketch(self, plan: DraftTraining, taps: Sequence[int]) -> Learner:
        """The same without weights. Raises ParameterError for what cannot be trained."""
        if plan.kind == "model":
            config = self._student(plan)
            with torch.device("meta"):
                return Student(config, min(plan.vocab, self.config.vocab_size))
        shape = self.shape(taps, plan)
        with torch.device("meta"):
            return make_head(shape)

    def _student(self, plan: DraftTraining) -> PreTrainedConfig:
        if plan.mlp_width is not None:
            raise ParameterError("--mlp-width", plan.mlp_width, _LEFT_OUT.format(kind=plan.kind))
        if plan.unroll != DraftTraining.unroll:
            allowed = "left out with --kind model, which learns all guesses of a draft from one pass"
            raise ParameterError("--unroll", plan.unroll, allowed)
        return student_config(self.published, self.taken, tied=self.rows.data_ptr() == self.embedding.data_ptr())

    def shape(self, taps: Sequence[int], plan: DraftTraining) -> HeadConfig:
        """Of a head with one layer as wide as the target's, or with the target's last ones.

        plan.vocab: tokens it can say, at most the target's.
        """
        if plan.layers is not None:
            raise ParameterError("--layers", plan.layers, "left out but with --kind model")
        if plan.kind == "hidden_transfer":
            return self._transfer(taps[-1], plan)
        layer = self._layer(plan.mlp_width)
        mask = self.config.vocab_size - 1 if plan.kind == "parallel" else None  # any will do: its meaning is learnt
        return self._config(layer, taps, plan, mask_token=mask)

    def _transfer(self, tap: int, plan: DraftTraining) -> HeadConfig:
        """Raises ParameterError where its layers could not be the target's."""
        if plan.mlp_width is not None:
            raise ParameterError("--mlp-width", plan.mlp_width, _LEFT_OUT.format(kind=plan.kind))
        config, count = self.config, self.config.layers - tap
        biased = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
        family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.output_bias else "llama"
        layer = self._layer(None) | {"model_type": family, "num_hidden_layers": count, **biased}
        head = self._config(layer, (tap,), plan, transfers=plan.unroll)
        ours = replace(
            config, family=family, tied=head.decoder.tied, windows=config.windows[tap:], scales=config.scales[tap:],
            embed_width=head.decoder.embed_width,
        )  # fmt: skip
        if ours != head.decoder:
            raise ParameterError("MODEL", self.name, "a target with layers as Llama, Qwen2 or Qwen3 have them")
        return head

    def _layer(self, mlp_width: int | None) -> dict[str, Any]:
        config = self.config
        return {
            "model_type": "llama",
            "hidden_size": config.width,
            "intermediate_size": config.mlp_width if mlp_width is None else mlp_width,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": self.rope,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def _config(self, layer: dict[str, Any], taps: Sequence[int], plan: DraftTraining, **kind: Any) -> HeadConfig:
        config = self.config
        name = Path(self.name).name if Path(self.name).exists() else self.name
        size = min(plan.vocab, config.vocab_size)
        return HeadConfig(
            layer,
            config.width,
            size,
            taps=tuple(taps),
            verifier=name,
            architectures=tuple(self.published.architectures or ()),
            **kind,
        )

    def head(self, config: HeadConfig, says: Tensor, seed: int) -> Head:
        """A head to be trained, float32. says [Vd]: the tokens that it can say, whose rows of the target's it keeps."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = make_head(config)
        with torch.no_grad():
            head.embed_tokens.weight.copy_(self.embedding)
            head.lm_head.weight.copy_(self.rows[says])
            if self.norm is not None:
                head.norm.weight.copy_(self.norm)
            if config.transfers:
                for layer, tensors in zip(head.layers, self.layers, strict=True):
                    layer.load_state_dict(tensors)
        head.lm_head.requires_grad_(False)
        head.set_vocabulary(says)
        return head


def _taken(source: str, kind: str, model: Transformer, said: PreTrainedConfig, layers: int | None) -> tuple[int, ...]:
    """The target's layers of which the drafter is made."""
    count, config = model.layers, model.config
    if kind == "model":
        if said.model_type not in FAMILIES:
            raise ParameterError("MODEL", source, f"a target of the families {', '.join(FAMILIES)} with --kind model")
        wanted = usual_layers(count) if layers is None else layers
        if wanted > count:
            raise ParameterError("--layers", wanted, f"at most the target's {count}")
        return tuple(spread(count, wanted))
    plain = config.gated and config.norm == "rms" and config.norm_affine
    return tuple(range(taps_of(count)[-1], count)) if kind == "hidden_transfer" and plain else ()


def _weight(norm: object) -> Tensor | None:
    weight = getattr(norm, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def most_frequent(shards: Sequence[Shard], vocab_size: int, size: int) -> Tensor:
    """[size] int64, rising: the tokens that answers have most often; of two equally frequent ones the smaller."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in shards:
        for index in range(len(shard)):
            counts += shard.answer(index).long().bincount(minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(shard: Shard, says: Tensor) -> float:
    """The share of a shard's answers' tokens that a head can say."""
    answers = torch.cat([shard.answer(index) for index in range(len(shard))])
    return float(torch.isin(answers.long(), says).float().mean())
