"""High precision -> float8: the records of a cast, scales, histories, and the cast itself.

`spec`, `scale` and `history` know nothing of kernels; `quantize` runs them.
"""
