"""Device memory on its way through pinned host memory, for transports that need it."""
