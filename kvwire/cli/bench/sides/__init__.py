"""What runs in the two processes of a pair; ``python -m kvwire.cli.bench.sides``.

Each line of standard input is a call, ``{"call": name, "arguments": {...}}``, and each
line of standard output its answer. The end of the input ends the process. The calls are
the methods of :class:`~kvwire.cli.bench.sides.half.Half`.
"""
