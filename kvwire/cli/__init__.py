"""The ``kvwire`` command."""
