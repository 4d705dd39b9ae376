"""What became of guesses, those included that were never verified."""

from __future__ import annotations

from paceline.draft import Draft, Verdict


def judge(draft: Draft, verdict: Verdict) -> tuple[list[int], list[int]]:
    """Of each row's guesses, how many can be judged by what the row gained, and how many of those are right.

    Those up to the first that is wrong, or that lies beyond what was gained. So a draft can be judged of which only a
    part was verified, or nothing.
    """
    judged, right = [], []
    for guesses, gained in zip(draft.guesses, verdict.host.tokens, strict=True):
        known = min(len(guesses), len(gained))
        good = next((place for place in range(known) if guesses[place] != gained[place]), known)
        judged.append(min(good + 1, known))
        right.append(good)
    return judged, right
