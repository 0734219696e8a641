"""The core under simulated faults; ``python -m tests.programs.sim`` runs it."""
