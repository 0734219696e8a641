"""Memory as payload: NumPy, torch and the buffer protocol; copies; checksums."""

from kvwire.memory.device.progress import LayerCounter

__all__ = ["LayerCounter"]
