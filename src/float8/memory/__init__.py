"""Save memory of activations: store for backward in float8, or recompute in backward."""
