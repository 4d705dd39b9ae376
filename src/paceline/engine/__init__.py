"""The engine: requests are admitted to rows, rounds run, and tokens become answers."""
