"""Callbacks, converters, layers and a weight source for other libraries, one module for each."""
