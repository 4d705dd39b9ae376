"""Operations of a round on a device: Triton kernels, each beside its torch reference, and captured graphs."""
