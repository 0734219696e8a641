"""``kvwire doctor``: what can run here, what cannot, and the remedies.

A host's ``checks`` and the configuration's requirements together make an
``examination``, which a ``screen`` shows. With a ``peer``, one doctor measures the path
to another.
"""
