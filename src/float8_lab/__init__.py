"""What measures and shows the library: reference models, trainer, bench, the `float8` command.

Needs the `cli` extra: `pip install "float8[cli]"`. The library itself imports nothing of it.
"""
