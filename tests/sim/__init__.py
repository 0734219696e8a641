"""The core under simulated faults; ``python -m tests.sim`` runs it."""
