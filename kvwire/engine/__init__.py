"""Synchronous access: a communicator on its own thread, for programs without a loop."""
