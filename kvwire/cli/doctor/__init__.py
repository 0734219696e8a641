"""``kvwire doctor``: the transports that can run here, and the remedies for the others.

A host's ``checks`` and the configuration's requirements together make an
``examination``, which a ``screen`` shows.
"""
