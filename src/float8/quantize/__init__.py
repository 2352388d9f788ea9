"""High precision -> float8: how a tensor is cast, and what a GEMM reads of it.

`spec`, `scale` and `history` know nothing of kernels; `quantize` runs them.
"""
