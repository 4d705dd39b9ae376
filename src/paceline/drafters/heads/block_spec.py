"""What a block drafter computes beside its layers: one pass over the last token and masks drafts a block of tokens.

Sources: z-lab's DFlash and DFlash2, DeepSpec's DSpark, and the layouts in which such drafters are
published (``block_layouts``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.errors import ModelFormatError

MarkovKind: TypeAlias = Literal["vanilla", "gated", "rnn"]
BlockKind: TypeAlias = Literal["dflash", "dspark", "dflash2"]
BLOCK_KINDS: tuple[BlockKind, ...] = ("dflash", "dspark", "dflash2")


@dataclass(frozen=True)
class BlockSpec:
    """A block of ``size`` rows: the text's last token (the anchor), and masks behind it.

    mask_token: the target's token whose embedding is a mask.
    anchor_first: whether a row's logits are of the token behind its own, so that the anchor's row drafts, too. Else of
        the token in its own place, and the anchor's row drafts nothing.
    causal: whether the rows of a block see those behind them in no layer (True) or in every one (False). None: layers
        with a sliding window are causal, others are not.
    markov_rank, markov: the logits of a row get a bias of low rank that depends on the token before; 0: no bias.
    confidence: whether a probability of acceptance is predicted. confidence_reads_token: also from the token before.
    selector_rank, selector_top_k: a row's most probable tokens get scores that depend on the token before, and no other
        is drafted; 0: no selector.
    conv_kernel, conv_group: taps, and channels per group, of the convolutions over a block around attention and MLP; 0:
        none.
    embedding_scale: factor of a block's embeddings. output_multiplier, logits_cap: the logits x of the output head are
        cap * tanh(multiplier * x / cap); None: they are not capped.

    Raises ModelFormatError for values that cannot run.
    """

    size: int
    mask_token: int
    anchor_first: bool = False
    causal: bool | None = None
    markov_rank: int = 0
    markov: MarkovKind = "vanilla"
    confidence: bool = False
    confidence_reads_token: bool = False
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel: int = 0
    conv_group: int = 0
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logits_cap: float | None = None

    def __post_init__(self) -> None:
        counts = (self.markov_rank, self.selector_rank, self.selector_top_k, self.conv_kernel, self.conv_group)
        wrong = {
            f"block_size {self.size}, which is from 2 to {MAX_SPECULATION_LENGTH}": not 2
            <= self.size
            <= MAX_SPECULATION_LENGTH,
            "a negative size": min(counts) < 0,
            f"markov_head_type {self.markov!r}": self.markov not in ("vanilla", "gated", "rnn"),
            "a selector without selector_rank or selector_top_k": (self.selector_rank > 0) != (self.selector_top_k > 0),
            "convolutions without conv_kernel_size or conv_group_size": (self.conv_kernel > 0) != (self.conv_group > 0),
            "both a Markov head and a selector": self.markov_rank > 0 and self.selector_rank > 0,
            "confidence_head_with_markov without a Markov head": self.confidence_reads_token and not self.markov_rank,
            f"final_logit_softcapping {self.logits_cap}": self.logits_cap is not None and self.logits_cap <= 0,
        }
        if problems := [what for what, there in wrong.items() if there]:
            raise ModelFormatError(f"the block drafter's configuration has {' and '.join(problems)}")

    @property
    def kind(self) -> BlockKind:
        """The published kind that has these parts."""
        if self.selector_rank or self.conv_kernel:
            return "dflash2"
        return "dspark" if self.markov_rank or self.confidence else "dflash"

    @property
    def first_row(self) -> int:
        """The row that drafts the first token."""
        return 0 if self.anchor_first else 1

    @property
    def most_drafted(self) -> int:
        """Draft tokens of a whole block."""
        return self.size - self.first_row

    def is_causal(self, window: int | None) -> bool:
        """Whether a row sees no row behind it, in a layer with this sliding window."""
        return window is not None if self.causal is None else self.causal
