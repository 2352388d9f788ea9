"""Converting a model, and the report of what was converted."""
