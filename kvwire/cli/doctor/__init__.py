"""``kvwire doctor``: what can run here, what cannot, and what to do about it.

Facts are read by small functions that are told where to look (``process``,
``machine``), judged by pure ones (``findings``, ``requirements``), put together
(``examination``) and shown (``screen``). With a peer, ``probe`` measures what
``attendant`` serves at the other side.
"""
