"""High precision -> float8: how a tensor is cast, and what a GEMM reads of it.

`spec` and `scale` know nothing of kernels; `cast` runs them.
"""
