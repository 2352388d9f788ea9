"""Converting a model, and the report of what was converted; `float8` itself exports it."""
