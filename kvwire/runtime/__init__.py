"""Shared by all parts of a communicator: services, lent memory, threads, counters."""
