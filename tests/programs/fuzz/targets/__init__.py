"""One module for each target, each with a function ``run``."""
