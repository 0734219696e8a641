"""Data between GPUs by NCCL, beside the control link of another transport."""

from kvwire_nccl.backend import NcclBackend

__all__ = ["NcclBackend"]
