"""``kvwire doctor``: what can run here, what cannot, and what to do about it.

The ``checks`` of a host are put together with what is asked for (``examination``) and
shown (``screen``). With a ``peer``, one doctor measures what the other one serves.
"""
