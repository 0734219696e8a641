"""Data over NIXL, with any of its plug-ins, beside another transport's control link."""

from kvwire_nixl.backend import NixlBackend

__all__ = ["NixlBackend"]
