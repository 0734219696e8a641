"""What a communicator has done and holds, for monitoring.

:mod:`kvwire.observe.prometheus` needs the extra ``metrics``. Without it,
``communicator.counters`` and the other attributes read here are plain numbers.
"""
