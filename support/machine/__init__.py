"""What computes: devices, processes that share the work, memory, compiled code."""
