"""Uses of private API of torch and Triton; `FLOAT8_PLAIN_LAUNCH=1` selects public fallbacks."""
