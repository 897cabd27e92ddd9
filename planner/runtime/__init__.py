"""Executes a plan: launcher, transport, executor (the only torch.distributed import)."""
