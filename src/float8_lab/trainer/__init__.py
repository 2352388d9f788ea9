"""A reference trainer: a Llama on byte-level text, in high precision or with a float8 recipe."""
