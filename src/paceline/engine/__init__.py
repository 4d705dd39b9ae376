"""The loop: requests become rows, rounds are run, tokens become answers."""
