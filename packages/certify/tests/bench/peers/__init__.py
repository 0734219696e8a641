"""Programs of the peers: what others' libraries do with the same fragments.

They run in whatever interpreter has the peer installed, which need not have kvwire. So
nothing here imports kvwire: a program needs NumPy, its peer, and
:mod:`~packages.certify.tests.bench.peers.serving` beside it.

Like a side of kvwire, a program reads work as lines of JSON and answers each. It works
out by itself where the fragments of a work lie, so everybody moves the same ones.
"""
