"""Callbacks, converters and layers for other training libraries, one module for each."""
