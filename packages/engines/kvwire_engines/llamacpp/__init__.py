"""Sessions of llama.cpp's server, kept in a store and continued by another server."""

from kvwire_engines.llamacpp.sessions import LlamaCppSessions

__all__ = ["LlamaCppSessions"]
