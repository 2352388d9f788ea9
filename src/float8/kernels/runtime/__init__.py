"""Launch kernels, partly by private API; with `FLOAT8_PLAIN_LAUNCH=1`, by public API alone."""
