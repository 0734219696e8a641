"""The rows of docs/reference/wrong-uses.md, done as they stand there.

A row that is one call, such as ``conn.send(-1, b'x')``, is done by reading it; others
are done by the step of their name in :mod:`tests.support.wrong_uses.steps`.
"""
