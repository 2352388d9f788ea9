"""Callbacks, converters and layers that other libraries need; one module for each.

`float8` imports none of these: a module of this folder imports the library it is for.
"""
