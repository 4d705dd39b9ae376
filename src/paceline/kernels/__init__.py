"""The CPU kernels: a small C++ extension (``csrc/``) that runs a whole forward pass, and its plain torch twin.

spec.py     what a decoder is made of: plain tensors and numbers
pack.py     quantisation, and the order in which the kernels stream weights
twin.py     every kernel once more in plain torch: the reference of the tests, and what runs without a compiler
native.py   the extension, loaded with ctypes
build.py    compiles it
"""
