"""Measuring for `float8 bench`: GEMMs, casts, layers, blocks and where their time goes."""
