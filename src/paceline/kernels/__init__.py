"""Operations behind protocols, each with a plain torch reference: C++ for CPUs, Triton for GPUs, attention.

cpu.py      the round's operations by the compiled kernels (``core.ops.HostOps``)
spec.py     what a decoder is made of: plain tensors and numbers
pack.py     quantisation, and the order in which the kernels stream weights
twin.py     every kernel in plain torch: the reference of the tests, and what runs without a compiler
native.py   the extension (``csrc/``), loaded with ctypes
build.py    compiles it
attention/  padded, split and ragged attention over the cache
gpu/        operations on a device: Triton kernels, their torch references, captured graphs
"""
