"""Monitoring: a communicator's counts, metrics, traces and snapshots.

:mod:`kvwire.observe.prometheus` needs the extra ``metrics``. Without it,
``communicator.counters`` and the other attributes read here are plain numbers.
"""
