"""Training on several devices: float8 all-gather under FSDP2, and amaxes across ranks.

It stands below `convert`, which gives weights the class that FSDP2 gathers in float8, and `sync`.
"""
