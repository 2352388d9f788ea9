"""Tensor parallel that communicates in float8, and the tensors that DDP must not broadcast."""
