"""Implementations of the tensor operations, each with a plain torch reference: C++ for CPUs, Triton for GPUs.

cpu.py      the round's operations, run by the compiled kernels (``core.ops.HostOps``)
spec.py     the parts of a decoder: plain tensors and numbers
pack.py     quantisation, and the order in which the kernels read weights
native.py   the extension (``csrc/``), loaded with ctypes
abi.py      its structs and functions, written by ``csrc/bindings.py``
structs.py  tensors as these structs
build.py    compiles it
attention/  padded, split and ragged attention over the cache
gpu/        operations on a device: Triton kernels, their torch references, captured graphs
"""
