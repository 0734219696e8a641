"""Internal: the state behind ``Communicator`` and ``Connection``.

Users hold the objects of :mod:`kvwire.communicator` and :mod:`kvwire.connection`, which
have the documented names and nothing else; the rest of kvwire works on what is here.
"""
