"""Callbacks, converters and layers for other training libraries, one module for each.

Each module imports its library; nothing else in `float8` imports these modules.
"""
