"""Batch files: one request per input line, one response per output line, as over HTTP."""
