"""First differences between the prompts of one client, the usual reason why a transcript is not found in the cache.

An agent's next prompt repeats its last one. A date or a counter near the beginning that changes each time makes the
whole rest new to the prefix cache, and nothing else shows it.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.engine.prefixes import common_prefix_length

log = logging.getLogger("paceline.server")

_SHOWN = 32  # tokens shown on each side of a difference
_CLIENTS = 64  # clients that are remembered, the last ones
_PROMPTS = 4  # prompts per client
_TOKENS = 2**17  # tokens per prompt, 4 bytes each: the rest is not compared. All together take up to 128 MiB


@dataclass(frozen=True)
class Divergence:
    """A prompt beside the most similar earlier prompt of its client.

    first_difference: index of the first token that differs. earlier_tokens: length of the earlier prompt.
    """

    first_difference: int
    earlier_tokens: int
    earlier: Sequence[int]

    @property
    def extends(self) -> bool:
        """Whether the prompt begins with the whole earlier one."""
        return self.first_difference == self.earlier_tokens


class Transcripts:
    """The last prompts of each client. Not thread-safe: call it from the event loop only."""

    def __init__(self) -> None:
        self._of_client: OrderedDict[str, list[array[int]]] = OrderedDict()

    def note(self, client: str, prompt: Sequence[int]) -> Divergence | None:
        """Remember a prompt. Return how it differs from the most similar earlier one; None if there is none.

        The earlier prompt that it extends is forgotten.
        """
        kept = array("i", prompt[:_TOKENS])
        earlier = self._of_client.pop(client, [])
        found = max((_compared(each, kept) for each in earlier), key=lambda one: one.first_difference, default=None)
        rest = [each for each in earlier if found is None or not found.extends or each is not found.earlier]
        self._of_client[client] = [*rest, kept][-_PROMPTS:]
        if len(self._of_client) > _CLIENTS:
            self._of_client.popitem(last=False)
        return found


def _compared(earlier: array[int], prompt: array[int]) -> Divergence:
    return Divergence(common_prefix_length(earlier, prompt, len(prompt)), len(earlier), earlier)


def log_difference(divergence: Divergence, prompt: Sequence[int], spell: Callable[[Sequence[int]], str]) -> None:
    """Log the texts around a first difference. spell: returns the text of token ids."""
    at = divergence.first_difference
    parts = {
        "before": prompt[max(0, at - _SHOWN) : at],
        "was": divergence.earlier[at:][:_SHOWN],
        "now": prompt[at:][:_SHOWN],
    }
    texts = {name: spell(tokens) for name, tokens in parts.items()}
    counts = {"first_difference": at, "earlier_tokens": divergence.earlier_tokens, "prompt_tokens": len(prompt)}
    log.debug("prompt differs", extra={"fields": counts | texts})
