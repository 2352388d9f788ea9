"""Kernels that cast and multiply grouped rows, for experts; ops of ``torch.ops.float8``."""
