"""The public objects, and the code that accepts, dials and restores links.

``Communicator``, ``Connection``, ``Peer``, ``Request``, ``Region`` and ``RemoteWindow``
are defined here, ``Engine`` for programs without a loop, and the two sides of a window
in ``windows``. Their public names are the documented API; within this folder they use
each other's private names. Other rooms use a connection's driver and
:class:`kvwire.driver.services.Services` instead.
"""
