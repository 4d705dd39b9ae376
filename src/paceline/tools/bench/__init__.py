"""Benchmarks: every number comes with the machine, the versions and the command that measured it."""
