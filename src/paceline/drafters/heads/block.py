"""Block drafters in torch: a block of the text's last token and masks, which reads the text as keys and values only.

The target's hidden states of a token are fused to one vector c. Layer i stores keys k_norm(K_i c) and values V_i c of
it, so the text needs no queries and no MLP (``inject``). The block's rows attend to all of them and to each other, and
their keys and values are dropped after the pass. The output head is the target's unless the checkpoint has one.

* DFlash: the rows' distributions are independent.
* DSpark: a bias of low rank on a row's logits depends on the token before. A small head predicts whether the target
  will accept the token. (Cheng et al., DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
  Generation, 2026, in deepseek-ai/DeepSpec. Sections 3.1: the drafter; 3.2.1: the confidence; 3.3: the training.)
* DFlash2: a row's most probable tokens get scores from a pair of codebooks, by the token before. Short convolutions
  over the block stand around attention and MLP.

Shapes: B rows, L = the block's size, N draft tokens to continue, T positions, H the drafter's width, V the target's
vocabulary, Vd the drafter's. Modules and tensors are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import HeadLayer, PackedBlocks, rms_norm
from paceline.kernels.attention.base import Attend
from paceline.models.decoding.draft_vocabulary import NEVER
from paceline.models.torch.rotary import RotaryAngles, Rotation, rotate


class GroupedConvolution(nn.Module):
    """Causal convolutions over a block around a sublayer f: x + after(f(before(x))).

    The coefficient of a tap is its base's plus one of its group, which a projection of the sublayer's input gives.
    base_kernel [2, K, H]: before and after the sublayer, K taps. The tap t reads the row t places before.
    """

    def __init__(self, width: int, block: BlockSpec) -> None:
        super().__init__()
        self.taps, self.groups = block.conv_kernel, width // block.conv_group
        base = torch.zeros(2, self.taps, width)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * self.taps * self.groups, bias=False)

    def around(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return after(f(before(x))) for x [B, L, H]."""
        kernels = self.kernel_projection(x).view(*x.shape[:-1], 2, self.taps, self.groups)
        before, after = kernels.unbind(-3)
        return self._convolve(1, after, sublayer(self._convolve(0, before, x)))

    def _convolve(self, side: int, kernel: Tensor, x: Tensor) -> Tensor:
        """x [B, L, H] with the group's coefficients ``kernel`` [B, L, K, groups] -> [B, L, H]."""
        parts = x.view(*x.shape[:-1], self.groups, -1)
        base = self.base_kernel[side].view(self.taps, self.groups, -1)
        total = torch.zeros_like(parts)
        for tap in range(self.taps):
            earlier = pad(parts, (0, 0, 0, 0, tap, 0))[:, : x.shape[1]]
            total = total + (base[tap] + kernel[:, :, tap, :, None]) * earlier
        return total.flatten(-2)


class BlockLayer(HeadLayer):
    """A decoder layer; in DFlash2 with convolutions around attention and MLP."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__(config, index, joined=False)
        block = config.block
        assert block is not None, "only block drafters have such layers"
        self.attention_conv = self.mlp_conv = None
        if block.conv_kernel:
            self.attention_conv = GroupedConvolution(config.width, block)
            self.mlp_conv = GroupedConvolution(config.width, block)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(hidden, rotation, attend)
        attention = self.attention_conv.around(
            self.input_layernorm(hidden), lambda x: cast(Tensor, self.self_attn(x, rotation, attend))
        )
        hidden = hidden + attention
        return hidden + self.mlp_conv.around(self.post_attention_layernorm(hidden), self.mlp)


class MarkovHead(nn.Module):
    """Bias of a row's logits by the token before: W2 e, where e is the token's row of W1 [V, rank].

    "gated": W2 (sigmoid(G [z; e] + b) * e), z the row's state. "rnn": a recurrent state of ``rank`` values is carried
    along the draft tokens. (DeepSpec.)
    """

    def __init__(self, config: HeadConfig, block: BlockSpec) -> None:
        super().__init__()
        rank, self.kind = block.markov_rank, block.markov
        self.markov_w1 = nn.Embedding(config.decoder.vocab_size, rank)
        self.markov_w2: nn.Module = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.width + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.width, 3 * rank)

    def read(self, states: Tensor, path: Tensor) -> Tensor:
        """Input [N, rank] of W2, whose output is the bias of row n.

        states: [N, n + 1, H], of rows 0 to n. path: [N, n + 1], the tokens before them.
        """
        if self.kind == "rnn":
            return self._carried(states, path)
        before = cast(Tensor, self.markov_w1(path[:, -1]))
        if self.kind == "gated":
            before = self.gate_proj(torch.cat((states[:, -1], before), dim=-1)).sigmoid() * before
        return before

    def _carried(self, states: Tensor, path: Tensor) -> Tensor:
        before = self.markov_w1(path)
        carried = output = torch.zeros_like(before[:, 0])
        for step in range(path.shape[1]):
            joint = self.joint_proj(torch.cat((carried, before[:, step], states[:, step]), dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = gate.sigmoid()
            carried = gate * carried + (1 - gate) * candidate.tanh()
        return output.tanh()


class ConfidenceHead(nn.Module):
    """Probability that the target accepts a row's token if it accepts those before."""

    def __init__(self, config: HeadConfig, block: BlockSpec) -> None:
        super().__init__()
        self.reads_token = block.confidence_reads_token
        self.proj = nn.Linear(config.width + block.markov_rank * self.reads_token, 1)


class CandidateSelector(nn.Module):
    """Scores of a row's most probable tokens: logits plus the sum over r of A[p] * (P z) * C[c] for token c after p.

    predecessor_codebook A, successor_codebook C: [V, rank].
    """

    def __init__(self, config: HeadConfig, block: BlockSpec) -> None:
        super().__init__()
        shape = config.decoder.vocab_size, block.selector_rank
        self.top_k = block.selector_top_k
        self.predecessor_codebook, self.successor_codebook = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
        self.hidden_projection = nn.Linear(config.width, block.selector_rank, bias=False)

    def scores(self, logits: Tensor, state: Tensor, before: Tensor, tokens: Tensor | None) -> Tensor:
        """Scores [N, S], ``NEVER`` except for the most probable tokens.

        logits: [N, S], of ``tokens`` [S]; None: of the whole vocabulary. state [N, H]. before [N]: the token before.
        """
        values, places = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        query = embedding(before, self.predecessor_codebook) * self.hidden_projection(state)
        successors = embedding(places if tokens is None else tokens[places], self.successor_codebook)
        scores = values + torch.einsum("nr,nkr->nk", query, successors).float()
        return logits.new_full(logits.shape, NEVER).scatter_(-1, places, scores)


class ScoredPart(NamedTuple):
    """The part of its vocabulary that a block drafter scores.

    tokens: [S] int64. bias: the product W2 of a Markov head for them, [N, rank] -> [N, S].
    """

    tokens: Tensor
    bias: Callable[[Tensor], Tensor] | None


class BlockTail:
    """What ties the draft tokens of a block together, behind the layers. States may be of another type."""

    def __init__(
        self, markov: MarkovHead | None, confidence: ConfidenceHead | None, selector: CandidateSelector | None
    ) -> None:
        self._markov, self._confidence, self._selector = markov, confidence, selector
        self._reads_token = confidence is not None and confidence.reads_token

    def weight_bytes(self) -> int:
        """Bytes of their weights."""
        parts = [part for part in (self._markov, self._confidence, self._selector) if part is not None]
        own = sum(weight.nbytes for part in parts for weight in part.parameters())
        return own + sum(getattr(part, "nbytes", 0) for whole in parts for part in whole.children())

    def continued(self, logits: Tensor, states: Tensor, path: Tensor, part: ScoredPart | None = None) -> Tensor:
        """Logits [N, S] of a draft token after those before it.

        logits: [N, S], of its row. states: [N, n + 1, H], of the rows up to its own. path: [N, n + 1], the text's last
        token and the n draft tokens before it, as the target's ids. part: the tokens that are scored; None: all of the
        drafter's, S = Vd.
        """
        if self._markov is not None:
            read = self._markov.read(states.to(self._markov.markov_w1.weight.dtype), path)
            product = self._markov.markov_w2 if part is None or part.bias is None else part.bias
            logits = logits + product(read).float()
        if self._selector is not None:
            state = states[:, -1].to(self._selector.hidden_projection.weight.dtype)
            logits = self._selector.scores(logits, state, path[:, -1], None if part is None else part.tokens)
        return logits

    def confidence(self, state: Tensor, before: Tensor) -> Tensor | None:
        """Probability [N] that a draft token is accepted if those before it are; None without such a head.

        state: [N, H], of its row. before: [N], the token before it.
        """
        logits = self.confidence_logits(state, before)
        return None if logits is None else logits.sigmoid()

    def confidence_logits(self, state: Tensor, before: Tensor) -> Tensor | None:
        """Logits [N] of ``confidence``."""
        if self._confidence is None:
            return None
        state = state.to(self._confidence.proj.weight.dtype)
        if self._reads_token:
            assert self._markov is not None, "the configuration was checked"
            state = torch.cat((state, self._markov.markov_w1(before)), dim=-1)
        return cast(Tensor, self._confidence.proj(state)).float().squeeze(-1)


class BlockHead(Head):
    """A block drafter. Its block has ``spec.size`` rows.

    Training packs the blocks of a text into one pass (DSpark, section 3.3). They lie end to end, so a pass has about as
    many rows as the text has tokens; DeepSpec samples where they begin.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, joined=0)
        assert config.block is not None, "the configuration is of another kind"
        self.spec = block = config.block
        self.stride = block.most_drafted
        self.markov_head = MarkovHead(config, block) if block.markov_rank else None
        self.confidence_head = ConfidenceHead(config, block) if block.confidence else None
        self.candidate_selector = CandidateSelector(config, block) if block.selector_rank else None

    def _add_fusion(self, config: HeadConfig) -> None:
        self.fc = nn.Linear(config.tap_count * config.target_width, config.width, bias=False)
        self.hidden_norm = rms_norm(config.width, config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device  # the output head may have no memory here

    def _layer(self, config: HeadConfig, index: int, joined: bool) -> HeadLayer:
        return BlockLayer(config, index)

    def fuse(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.hidden_norm(self.fc(features.to(self.dtype).flatten(-2))))

    def block(self, anchor: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run a block -> the normed states [B, size - first row, H] of the rows that draft.

        anchor: [B], the texts' last tokens. positions: [B, size], from the anchor's on.
        """
        tokens = torch.full_like(positions, self.spec.mask_token)
        tokens[:, 0] = anchor
        embedded = self.embed_tokens(tokens) * self.spec.embedding_scale
        return self.step(tokens, embedded.to(self.dtype), positions, attend).normed[:, self.spec.first_row :]

    def drafts(self, tokens: Tensor, features: Tensor, begins: Tensor, steps: int) -> Iterator[Tensor]:
        """See ``Head.drafts``. The anchor of a draft that begins at position i is token i + 1."""
        rows, length = tokens.shape
        row, place = begins // (length - 1), begins % (length - 1)
        counts = row.bincount(minlength=rows)
        column = torch.arange(len(begins), device=row.device) - (counts.cumsum(0) - counts)[row]
        anchors = row.new_zeros(rows, int(counts.max()))
        anchors[row, column] = place + 1
        fused = self.fuse(features)
        rotation = self._rotation(torch.arange(length, device=row.device)[None], fused.dtype)
        texts = [cast(HeadLayer, layer).self_attn.keys_and_values(fused, rotation) for layer in self.layers]
        blocks = anchors.flatten()[:, None] + torch.arange(self.spec.size, device=row.device)
        states = self.block(tokens.gather(1, anchors).flatten(), blocks, PackedBlocks(anchors, texts))
        yield from states[row * anchors.shape[1] + column, :steps].unbind(1)

    def continued(self, states: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.tail.continued(self.logits(states[:, -1]), states, path)
        return logits, self.tail.confidence_logits(states[:, -1], path[:, -1])

    def trained_steps(self, unroll: int, alone: bool) -> int:
        return min(unroll, self.spec.most_drafted)

    @torch.no_grad()
    def absorb(self, scale: Tensor) -> None:
        self.fc.weight.mul_(scale.repeat_interleave(self.config.target_width))

    def logits(self, normed: Tensor) -> Tensor:
        return scaled(self.spec, super().logits(normed).float())

    @property
    def tail(self) -> BlockTail:
        """The parts behind the layers."""
        return BlockTail(self.markov_head, self.confidence_head, self.candidate_selector)


class TextKeys:
    """Keys and values of a text's tokens in all layers of a block drafter, by one product.

    The layers' own matrices become parts of its matrix, so that none is held twice.
    """

    def __init__(self, head: BlockHead) -> None:
        attentions = [cast(HeadLayer, layer).self_attn for layer in head.layers]
        parts = [part for each in attentions for part in (each.k_proj, each.v_proj)]
        self._weight = torch.cat([part.weight.data for part in parts])
        biases = [part.bias.data for part in parts if part.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        for part, weight in zip(parts, self._weight.chunk(len(parts)), strict=True):
            part.weight = nn.Parameter(weight, requires_grad=False)
        self._norms, self._dim = [each.k_norm for each in attentions], attentions[0].dim
        rotary = head.config.decoder.layers[0].attention.rotary
        assert rotary is not None, "families of heads have rotary positions"
        self._angles = RotaryAngles(rotary, head.dtype, head.device)

    def __call__(self, fused: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [N, key heads, D] of each layer. fused: [N, H], at positions [N]."""
        both = linear(fused, self._weight, self._bias).view(len(fused), len(self._norms), 2, -1, self._dim)
        keys = torch.stack([norm(layer) for norm, layer in zip(self._norms, both[:, :, 0].unbind(1), strict=True)], 1)
        turned = rotate(keys.flatten(1, 2)[None], self._angles(positions[None]))[0].view_as(keys)
        return list(zip(turned.unbind(1), both[:, :, 1].unbind(1), strict=True))


def scaled(spec: BlockSpec, logits: Tensor) -> Tensor:
    """Apply a drafter's multiplier and cap to the logits of its output head."""
    logits, cap = logits * spec.output_multiplier, spec.logits_cap
    return logits if cap is None else cap * (logits / cap).tanh()
