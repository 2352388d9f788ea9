"""Training on several devices: FSDP2, tensor parallel, DDP, and groups that share amaxes."""
