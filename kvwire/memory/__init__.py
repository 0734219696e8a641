"""Memory as payload: NumPy, torch, the buffer protocol; copies; checksums."""
