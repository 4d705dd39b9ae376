"""What became of guesses, those included that were never verified."""

from __future__ import annotations

from paceline.batch import Draft, Verdict


def judge(draft: Draft, verdict: Verdict) -> tuple[list[int], list[int]]:
    """Of each row's guesses, how many can be judged by what the row gained, and how many of those are right.

    Those up to the first that was wrong or was not verified: the row's last token says whether it was right.
    """
    judged, right = [], []
    host, guesses = verdict.host, draft.tokens.tolist()
    for row, (accepted, count) in enumerate(zip(host.accepted, draft.counts.tolist(), strict=True)):
        another = accepted < count
        judged.append(accepted + another)
        right.append(accepted + (another and guesses[row][accepted] == host.tokens[row][accepted]))
    return judged, right
