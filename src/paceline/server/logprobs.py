"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from paceline.core.outputs import TokenLogprob
from paceline.models.text.tokenizer import Tokenizer
from paceline.server.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON cannot express


class Spelling:
    """Text and bytes of single tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes_of = functools.cache(tokenizer.token_bytes)
        self.text_of = functools.cache(tokenizer.token_text)

    def unique(self, token_id: int) -> str:
        """Return a text that identifies the token's bytes: in hexadecimal if they are not valid UTF-8."""
        spelled = self.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return a different text for each token: ``unique``, or its id if an earlier token has the same text."""
        owners: dict[str, int] = {}
        names = {token: self.unique(token) for token in token_ids}
        return {
            token: name if owners.setdefault(name, token) == token else f"token_id:{token}"
            for token, name in names.items()
        }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def completion_logprobs(
    spelling: Spelling,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    pieces: Sequence[str],
    offset: int,
    top: int,
) -> CompletionLogprobs:
    """Build the completion format.

    entries, pieces: log-probabilities and added text per token; None for a prompt's first token.
    offset: characters of the answer before them. top: likeliest tokens to list per token.
    """
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)

    def likeliest(entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        likely = dict(entry.top[:top])
        names = spelling.names([entry.token_id, *likely])
        return {names[token]: _finite(logprob) for token, logprob in likely.items()}

    return CompletionLogprobs(
        tokens=[spelling.unique(token) for token in token_ids],
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
        top_logprobs=[likeliest(entry) for entry in entries] if top else None,
        text_offset=offsets,
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenate two sequences of log-probabilities."""
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=tops,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(spelling: Spelling, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Build the chat format. Each entry lists as many likely tokens as the engine returned."""
    content = [
        ChatLogprob(
            **_spelled(spelling, entry.token_id, entry.logprob).model_dump(),
            top_logprobs=[_spelled(spelling, token, value) for token, value in entry.top],
        )
        for entry in entries
    ]
    return ChatLogprobs(content=content)


def _spelled(spelling: Spelling, token_id: int, logprob: float) -> TopLogprob:
    text, spelled = spelling.text_of(token_id), spelling.bytes_of(token_id)
    return TopLogprob(token=text, logprob=_finite(logprob), bytes=list(spelled))
