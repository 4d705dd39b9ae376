"""Evaluation of answers within time budgets. Programs that models wrote are run in a sandbox."""
