"""UCX as a transport: RDMA, shared memory or TCP, as UCX finds them.

It is a binding of libucp by ctypes (docs/adr/12-ucx.md), with lanes on top. UCX carries
payload only. The frames that announce payload, and the data that UCX needs to connect,
are sent on another transport's control link.
"""

from kvwire_ucx.backend import UcxBackend

__all__ = ["UcxBackend"]
