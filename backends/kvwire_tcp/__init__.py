"""The TCP transport: non-blocking sockets on the running loop, no copy of payloads.

A link reads and writes its socket itself, since the transports of asyncio own neither
end of the memory: they copy what they cannot send (CPython before 3.12), never say when
the memory is free again, and give received bytes away in buffers of their own.
"""

from kvwire_tcp.backend import TcpBackend

__all__ = ["TcpBackend"]
