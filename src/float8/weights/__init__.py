"""Weights that a module keeps in float8: beside its master weight, or in place of it."""
