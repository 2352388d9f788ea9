"""All uses of private API of torch and Triton; `FLOAT8_PLAIN_LAUNCH=1` turns them off."""
