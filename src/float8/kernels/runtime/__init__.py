"""All private API of torch and Triton that float8 uses; `FLOAT8_PLAIN_LAUNCH=1` uses none."""
