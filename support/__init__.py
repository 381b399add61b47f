"""What the scripts stand on, one file per concern. Nothing in here imports from the top level."""
