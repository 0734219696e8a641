"""Memory as payload: buffers of NumPy, torch and the buffer protocol; copies; checksums."""
