"""Weights that FSDP2 all-gathers in float8."""
