"""CUDA devices through torch or CuPy, each imported when a cache first needs it."""
