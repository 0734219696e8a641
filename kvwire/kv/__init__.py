"""Cache specs, layouts, block lists, transfer plans and outcomes, in pure NumPy."""
