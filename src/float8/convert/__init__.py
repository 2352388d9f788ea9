"""Convert a model to float8 and back, and report which layers run in it."""
