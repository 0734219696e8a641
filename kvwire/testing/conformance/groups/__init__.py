"""The checks, one module for each subject: ``links``, ``lanes``, and ``both``."""
