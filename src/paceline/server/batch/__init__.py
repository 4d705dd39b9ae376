"""Batch files: lines of requests in, a line of output for each, by the same checks and the same words as over HTTP."""
