"""What bench.py compares, and its records."""
