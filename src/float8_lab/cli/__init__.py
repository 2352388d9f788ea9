"""The `float8` command. Thin: it parses, calls the trainer, and shows what comes back."""
