"""What all parts of a communicator share: services, lent memory, threads, counters."""
