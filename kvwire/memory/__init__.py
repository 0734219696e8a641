"""Memory as payload: NumPy, torch, the buffer protocol; copies; checksums."""

from kvwire.memory.device.progress import LayerCounter

__all__ = ["LayerCounter"]
