"""Triton kernels for GPUs, each beside a plain torch twin. Importing a module with kernels needs triton."""
