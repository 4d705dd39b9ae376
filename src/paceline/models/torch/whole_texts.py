"""transformers' models that cannot use paceline's cache: every forward pass computes whole texts by their own code.

The cache keeps the tokens themselves, so rejected draft tokens, prefixes and trees need nothing of the model: recurrent
states, sparse attention and positions that a model counts itself are right by construction. A pass costs as much as a
prefill of every row's text. Rows are computed one by one, so a row's results do not depend on others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.cache import KVHeads
from paceline.errors import ModelFormatError
from paceline.kernels.attention.base import Attend, HasCache, Plan
from paceline.models.base import HiddenStates
from paceline.models.families.rotary import longest_sequence
from paceline.models.files.boundary import name_of
from paceline.models.torch.pretrained import (
    CHECK_LENGTH,
    TOLERANCE,
    attempt,
    bytes_of,
    check_causal,
    check_tokens,
    decoder_and_head,
    distance,
    logits_of,
    own_logits,
    refuse_unless,
    shared_copy,
)

_BASE, _DIGITS = 256, 3  # of a token id in the cache: bfloat16 holds whole numbers up to 256


class WholeTextModel:
    """A transformers model as a ``Model`` whose cache holds token ids. It shares the weights of ``model``.

    whole_texts: why the model cannot use keys and values of the cache, for the start line.
    Raises ModelFormatError if the model is not causal, or its logits for a text change with what is behind it.
    """

    device_obstacle = "a model computes whole texts by transformers' own code"
    layers, kv_heads, head_dim = 1, 1, _DIGITS
    kv_layers = (KVHeads(1, _DIGITS, _DIGITS, values_in_keys=True),)

    def __init__(self, model: PreTrainedModel, whole_texts: str) -> None:
        config = model.config.get_text_config()
        self.name, self.whole_texts = name_of(model), whole_texts
        self.vocab_size = int(config.vocab_size)
        self.dtype, self.device = model.dtype, model.device
        self.max_positions = longest_sequence(config)
        self._decoder, self._head = decoder_and_head(shared_copy(model))
        self._check(model)

    @torch.no_grad()
    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        """Run tokens, positions [B, L] int64 -> hidden [B, L, width].

        Raises ModelFormatError for taps: the model's layers are not looked into.
        """
        if taps:
            raise ModelFormatError(
                f"{self.name} gives no hidden states of its layers to a draft head: {self.whole_texts}"
            )
        assert isinstance(attend, HasCache)
        digits = torch.stack([tokens // _BASE**place % _BASE for place in range(_DIGITS)], -1)[:, None]
        attend.write(0, digits, digits)
        texts = self._texts(attend.stored(0)[:, 0])
        rows = [self._row(texts[row], tokens[row], attend.plan, row) for row in range(len(tokens))]
        return HiddenStates(torch.stack(rows))

    @staticmethod
    def _texts(digits: Tensor) -> Tensor:
        """Return the token ids [B, P] int64 of digits [B, P, _DIGITS]."""
        return (digits.long() * torch.tensor([_BASE**place for place in range(_DIGITS)], device=digits.device)).sum(-1)

    def _row(self, text: Tensor, tokens: Tensor, plan: Plan, row: int) -> Tensor:
        """Return the hidden states [L, width] of a row's new tokens [L]. text [P]: what the cache holds of the row."""
        start = int(plan.positions[row, 0])
        before = text[:start]
        if plan.ancestors is None:  # padding behind the last position is not computed
            hidden = self._run(torch.cat([before, tokens])[: self.max_positions])[start:]
            return torch.nn.functional.pad(hidden, (0, 0, 0, len(tokens) - len(hidden)))
        found: dict[int, Tensor] = {}
        for path in reversed(plan.paths[row].tolist()):  # nodes come after their ancestors
            nodes = [node for node in path if node < len(tokens)]
            if nodes[-1] not in found:
                hidden = self._run(torch.cat([before, tokens[nodes]]))[start:]
                found = dict(zip(nodes, hidden, strict=True)) | found
        return torch.stack([found.get(node, torch.zeros_like(hidden[0])) for node in range(len(tokens))])

    @torch.no_grad()
    def _run(self, text: Tensor) -> Tensor:
        """Return the hidden states [n, width] of a text [n]."""
        hidden: Tensor = self._decoder(input_ids=text[None], use_cache=False)[0]
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., width]."""
        return logits_of(self._head, hidden)

    def _check(self, model: PreTrainedModel) -> None:
        """Compare the logits of texts and of their beginnings with those of the unmodified model.

        In low precision a mixture's router may choose another expert where two are nearly equal, so a difference is
        looked for again in float32.
        """
        tokens = check_tokens(model)
        expected = own_logits(model, tokens)
        check_causal(model, tokens, expected)
        for length in (CHECK_LENGTH, CHECK_LENGTH // 2):
            texts = tokens[:, :length]
            found = attempt(self.name, partial(self._logits_of, texts))
            error = distance(found, expected[:, :length])
            if not error <= TOLERANCE.get(self.dtype, 0.1):  # or it is not a number
                refuse_unless(model, self.dtype != torch.float32, f"its logits differ from its own by {error:.2g}")
                WholeTextModel(copy.deepcopy(model).float(), self.whole_texts)  # raises if that differs

    def _logits_of(self, texts: Tensor) -> Tensor:
        """Return the logits [B, n, vocab_size] of texts [B, n]."""
        return torch.stack([self.logits(self._run(text)) for text in texts])

    def weight_bytes(self) -> int:
        """Return the bytes of all weights. Tied weights are counted once."""
        return bytes_of(self._decoder, self._head)
