"""Tools that measure and show the library: reference models, trainer, bench, the `float8` command.

Needs the `cli` extra: `pip install '.[cli]'` in a checkout. The library imports nothing of it.
"""
