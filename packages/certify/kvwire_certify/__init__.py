"""kvwire certify: tests the memory safety of any transport.

Write an adapter, a subclass of :class:`End` of about a dozen lines, and run ``kvwire
certify file.py:Class`` or call :func:`certify`. Schedules are generated from seeds.
They cancel, time out, kill, reconnect and withdraw while bytes are in flight, and an
oracle checks every byte of both memories: :mod:`kvwire_certify.oracle`.
"""

from kvwire_certify.runner import Breach, Certificate, certify
from kvwire_certify.transport import End

__all__ = ["Breach", "Certificate", "End", "certify"]
