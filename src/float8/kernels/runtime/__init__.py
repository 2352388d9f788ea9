"""Launching of kernels: all private API of torch and Triton that float8 uses is in here.

Each use has a fallback to public API, and `FLOAT8_PLAIN_LAUNCH=1` takes all fallbacks at once.
"""
