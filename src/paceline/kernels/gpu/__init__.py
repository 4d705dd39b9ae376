"""Triton kernels for GPUs, each with a plain torch reference. Importing a module with kernels needs triton."""
