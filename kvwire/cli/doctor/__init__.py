"""``kvwire doctor``: what can run here, what cannot, and what to do about it.

Facts are read by small functions that are told where to look (``facts``), judged by
pure ones (``findings``), put together with what is asked for (``examination``) and
shown (``screen``). With a ``peer``, one doctor measures what the other one serves.
"""
