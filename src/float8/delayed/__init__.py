"""Delayed scaling: scales from the amaxes of recent steps, kept in buffers of layers."""
