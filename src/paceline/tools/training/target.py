"""The weights and shapes that a drafter takes from its target: embedding, output, last norm, whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from paceline.config import DraftTraining
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.kinds import make_head
from paceline.errors import ParameterError
from paceline.models.description.spec import DecoderSpec, MLPSpec
from paceline.models.load.loading import load_config, load_model
from paceline.models.torch.linear import Dense
from paceline.models.torch.transformer import Transformer
from paceline.tools.training.hidden_states import taps_of
from paceline.tools.training.objective import Learner
from paceline.tools.training.shards import Shard
from paceline.tools.training.student import FAMILIES, Student, spread, student_config, usual_layers

_LEFT_OUT = "left out with --kind {kind}, whose layers are the target's"
_BLOCK_LAYERS = 2  # by default; with two, DSpark is ahead of a DFlash drafter of five (its paper)
_MOST_MARKOV_RANK = 256  # DeepSpec's, for targets of a width of 2560 to 5120
_NATIVE = (
    "a target that paceline runs itself, without experts, recurrent layers, a norm behind its embedding or a bias of "
    "its output head, whose embedding is unscaled and as wide as its layers"
)


@dataclass(frozen=True)
class Target:
    """A target's weights, as far as a drafter needs them.

    embedding, output [V, width] bfloat16. norm [width]: weight of the last norm; None if it has none.
    layers: tensors of the layers that the drafter starts from, named as in Llama's checkpoints. taken: their indices.
    """

    name: str
    published: PreTrainedConfig
    spec: DecoderSpec
    rope: dict[str, Any]
    embedding: Tensor
    output: Tensor
    norm: Tensor | None
    layers: tuple[dict[str, Tensor], ...] = ()
    taken: tuple[int, ...] = ()

    @staticmethod
    def load(source: str, kind: str = DraftTraining.kind, layers: int | None = None) -> Target:
        """Load what a drafter of this kind needs from the model's files. layers: see ``DraftTraining``.

        Raises ParameterError for a model that this kind of drafter cannot be made for, and what ``load_model`` raises.
        """
        model, published = load_model(source, dtype=torch.bfloat16), load_config(source)
        if not isinstance(model, Transformer) or not _can_teach(model.spec):
            raise ParameterError("MODEL", source, _NATIVE)
        embedding, head, norm = model.ends()
        assert isinstance(head, Dense), "weights are not quantized here"
        taken = _taken(source, kind, model, published, layers)
        rope = getattr(published, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
        if any(isinstance(each, dict) for each in rope.values()):  # by the type of a layer (OLMo 3)
            rope = rope.get("full_attention") or next(iter(rope.values()))
        return Target(
            source, published, model.spec, dict(rope), embedding, head.weight, _weight(norm),
            tuple(model.layer(index) for index in taken), taken,
        )  # fmt: skip

    def make_learner(self, options: DraftTraining, taps: Sequence[int], vocabulary: Tensor, seed: int) -> Learner:
        """A float32 head or draft model to train.

        vocabulary [Vd] int64: the tokens that a head can draft, or that training of a draft model considers.
        """
        if options.kind != "model":
            return self.head(self.shape(taps, options), vocabulary, seed)
        student = Student(self._student(options), len(vocabulary))
        assert self.norm is not None, "families whose layers are taken have one"
        student.take(self.embedding, self.output, self.norm, self.layers, vocabulary)
        return student

    def meta_learner(self, options: DraftTraining, taps: Sequence[int]) -> Learner:
        """The same on the meta device, without weights. Raises ParameterError for options that cannot be trained."""
        if options.kind == "model":
            config = self._student(options)
            with torch.device("meta"):
                return Student(config, min(options.vocab, self.spec.vocab_size))
        shape = self.shape(taps, options)
        with torch.device("meta"):
            return make_head(shape)

    def _student(self, options: DraftTraining) -> PreTrainedConfig:
        if options.mlp_width is not None:
            raise ParameterError("--mlp-width", options.mlp_width, _LEFT_OUT.format(kind=options.kind))
        if options.unroll != DraftTraining.unroll:
            allowed = "left out with --kind model, which learns all draft tokens from one pass"
            raise ParameterError("--unroll", options.unroll, allowed)
        return student_config(self.published, self.taken, tied=self.output.data_ptr() == self.embedding.data_ptr())

    def shape(self, taps: Sequence[int], options: DraftTraining) -> HeadConfig:
        """The configuration of a head: one layer of the target's width or, for hidden transfer, the target's last ones.

        A block drafter has ``options.layers``. The head's vocabulary has ``options.vocab`` tokens, or all of the
        target's if these are fewer. Raises ParameterError for options that cannot be trained.
        """
        if options.kind == "dspark":
            return self._block(taps, options)
        if options.layers is not None:
            raise ParameterError("--layers", options.layers, "left out except with --kind model and --kind dspark")
        if options.kind == "hidden_transfer":
            return self._transfer(taps[-1], options)
        layer = self._layer(options.mlp_width)
        if options.kind == "chimera":
            if self.spec.learned_positions:  # they are part of the embeddings that the head reads in decoding
                raise ParameterError("MODEL", self.name, "a target without learned positions for --kind chimera")
            return self._config(layer, (0, len(self.spec.layers)), options, residual_heads=options.unroll)
        mask = self.spec.vocab_size - 1 if options.kind == "parallel" else None  # any token will do
        return self._config(layer, taps, options, mask_token=mask)

    def _block(self, taps: Sequence[int], options: DraftTraining) -> HeadConfig:
        """The configuration of a DSpark drafter, whose block has ``options.unroll`` rows."""
        if options.unroll < 2:
            raise ParameterError("--unroll", options.unroll, "2 to 8 with --kind dspark: the tokens of a block")
        layer = self._layer(options.mlp_width) | {"model_type": "qwen3"}
        layer["num_hidden_layers"] = _BLOCK_LAYERS if options.layers is None else options.layers
        del layer["mlp_bias"]  # which this family has not
        block = BlockSpec(
            size=options.unroll,
            mask_token=int(self.embedding.any(-1).nonzero()[-1]),  # any token will do whose embedding is not zero
            anchor_first=True,
            markov_rank=min(self.spec.width // 8, _MOST_MARKOV_RANK),
            confidence=True,
            confidence_reads_token=True,
        )
        config = self._config(layer, taps, options, block=block)
        return replace(config, speculative_tokens=block.most_drafted)

    def _transfer(self, tap: int, options: DraftTraining) -> HeadConfig:
        """The configuration of a hidden transfer head. Raises ParameterError if it cannot use the target's layers."""
        if options.mlp_width is not None:
            raise ParameterError("--mlp-width", options.mlp_width, _LEFT_OUT.format(kind=options.kind))
        attention, mlp = self.spec.layers[tap].attention, self.spec.layers[tap].mlp
        biased = {"attention_bias": attention.bias, "mlp_bias": isinstance(mlp, MLPSpec) and mlp.bias}
        family = "qwen3" if attention.qk_norm else "qwen2" if attention.bias and not attention.output_bias else "llama"
        layer = self._layer(None) | {"model_type": family, "num_hidden_layers": len(self.spec.layers) - tap, **biased}
        head = self._config(layer, (tap,), options, transfers=options.unroll)
        ours = replace(
            self.spec, family=family, tied=head.decoder.tied, layers=self.spec.layers[tap:],
            embed_width=head.decoder.embed_width,
        )  # fmt: skip
        if ours != head.decoder:
            raise ParameterError("MODEL", self.name, "a target with layers as Llama, Qwen2 or Qwen3 have them")
        return head

    def _layer(self, mlp_width: int | None) -> dict[str, Any]:
        spec, attention = self.spec, self.spec.layers[-1].attention
        return {
            "model_type": "llama",
            "hidden_size": spec.width,
            "intermediate_size": spec.layers[-1].dense.width if mlp_width is None else mlp_width,
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.max_positions,
            "rms_norm_eps": spec.norm.eps,
            "rope_parameters": self.rope,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def _config(self, layer: dict[str, Any], taps: Sequence[int], options: DraftTraining, **kind: Any) -> HeadConfig:
        spec = self.spec
        name = Path(self.name).name if Path(self.name).exists() else self.name
        size = min(options.vocab, spec.vocab_size)
        return HeadConfig(
            layer,
            spec.width,
            size,
            taps=tuple(taps),
            verifier=name,
            architectures=tuple(self.published.architectures or ()),
            **kind,
        )

    def head(self, config: HeadConfig, vocabulary: Tensor, seed: int) -> Head:
        """A float32 head to train, with the target's embedding, last norm and output rows.

        vocabulary [Vd] int64: the tokens that it can draft.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = make_head(config)
        with torch.no_grad():
            head.embed_tokens.weight.copy_(self.embedding)
            head.lm_head.weight.copy_(self.output[vocabulary])
            if self.norm is not None:
                head.norm.weight.copy_(self.norm)
            if config.transfers:
                for layer, tensors in zip(head.layers, self.layers, strict=True):
                    layer.load_state_dict(tensors)
            if isinstance(head, BlockHead) and head.markov_head is not None:
                head.markov_head.markov_w1.weight.zero_()  # no bias after a token that training never meets
        head.lm_head.requires_grad_(False)
        head.set_vocabulary(vocabulary)
        return head


def _can_teach(spec: DecoderSpec) -> bool:
    plain = (spec.embed_width, spec.embed_scale, spec.logits_scale, spec.logits_cap) == (spec.width, 1.0, 1.0, None)
    plain = plain and not spec.head_bias and not spec.embed_norm
    return plain and all(isinstance(layer.mlp, MLPSpec) for layer in spec.layers)


def _taken(
    source: str, kind: str, model: Transformer, published: PreTrainedConfig, layers: int | None
) -> tuple[int, ...]:
    """Indices of the target's layers that the drafter starts from."""
    count, spec = model.layers, model.spec
    if kind == "model":
        if published.model_type not in FAMILIES:
            raise ParameterError("MODEL", source, f"a target of the families {', '.join(FAMILIES)} with --kind model")
        wanted = usual_layers(count) if layers is None else layers
        if wanted > count:
            raise ParameterError("--layers", wanted, f"at most the target's {count}")
        return tuple(spread(count, wanted))
    usual = all(layer.norms == "before" and layer.dense.gated for layer in spec.layers)
    plain = usual and spec.norm.kind == "rms" and spec.norm.affine
    return tuple(range(taps_of(count)[-1], count)) if kind == "hidden_transfer" and plain else ()


def _weight(norm: object) -> Tensor | None:
    weight = getattr(norm, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def most_frequent(shards: Sequence[Shard], vocab_size: int, size: int) -> Tensor:
    """[size] int64, ascending: the tokens that are most frequent in answers; ties go to the smaller token."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in shards:
        for index in range(len(shard)):
            counts += shard.answer(index).long().bincount(minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(shard: Shard, vocabulary: Tensor) -> float:
    """The fraction of the tokens of a shard's answers that are in ``vocabulary``."""
    answers = torch.cat([shard.answer(index) for index in range(len(shard))])
    return float(torch.isin(answers.long(), vocabulary).float().mean())
