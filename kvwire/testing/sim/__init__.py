"""The core under simulated faults; ``python -m kvwire.testing.sim`` runs it."""
