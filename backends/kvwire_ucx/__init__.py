"""UCX as a transport: RDMA, shared memory or TCP, as UCX finds them.

A binding on libucp by ctypes (docs/adr/0010) with lanes on it. UCX carries payload
only. The frames that announce it, and everything that UCX needs to come up, travel on
the control link of another transport.
"""

from kvwire_ucx.backend import UcxBackend

__all__ = ["UcxBackend"]
