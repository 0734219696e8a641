"""Run connections: what stands behind the public objects. Internal."""
