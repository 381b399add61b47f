"""What the scripts share, one file per concern. Nothing in here imports from the top level."""
