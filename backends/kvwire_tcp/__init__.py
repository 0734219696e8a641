"""The TCP transport: non-blocking sockets on the running loop, without copies.

Links read and write their sockets themselves, because asyncio's transports cannot use
given memory in either direction. They copy data that they cannot send (CPython before
3.12), do not report when its memory is free again, and deliver received bytes in their
own buffers.
"""

from kvwire_tcp.backend import TcpBackend

__all__ = ["TcpBackend"]
