"""Launch of kernels, partly by private API; `FLOAT8_PLAIN_LAUNCH=1` makes it public API alone."""
