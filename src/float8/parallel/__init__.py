"""Training on several devices: float8 all-gather under FSDP2, and amaxes across ranks."""
