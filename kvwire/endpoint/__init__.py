"""The public objects, and the code that accepts, dials and restores links.

``Communicator``, ``Connection``, ``Peer``, ``Request`` and ``Region`` are defined here,
``Engine`` for programs without a loop, and in ``windows`` both sides of a window. Their
public names are the documented API; within this folder they use each other's
private names. Other rooms use a connection's driver and
:class:`kvwire.driver.services.Services` instead.
"""
