"""The TCP transport: non-blocking sockets on the running loop, no copy of payloads.

Links read and write their sockets themselves, because asyncio's transports own neither
end of the memory. They copy data they cannot send (CPython before 3.12), do not report
when the memory is free again, and deliver received bytes in buffers of their own.
"""

from kvwire_tcp.backend import TcpBackend

__all__ = ["TcpBackend"]
