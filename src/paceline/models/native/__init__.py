"""Forward passes on the CPU kernels, and what their weights are packed from."""
