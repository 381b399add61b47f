"""A run over time: its logs, checkpoints, resuming, divergence."""
