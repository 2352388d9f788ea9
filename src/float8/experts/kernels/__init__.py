"""The kernels of experts, over rows in groups: casts, and GEMMs; ops of ``torch.ops.float8``."""
