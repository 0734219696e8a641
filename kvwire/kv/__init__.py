"""What is moved: cache specs, layouts, block lists, plans and outcomes. Pure NumPy."""
