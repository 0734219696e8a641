"""The objects that users hold, and the code that accepts, dials and restores links.

``Communicator``, ``Connection``, ``Peer``, ``Request`` and ``Region`` are the machines
themselves. Their public names are the documented ones; within this folder they use each
other's private names. Other rooms get the driver of a connection, and
:class:`kvwire.driver.services.Services`, in their place.
"""
