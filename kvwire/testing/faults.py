"""Deliberate faults, by a seed: links that misbehave so that the core can notice.

>>> with injected(FaultPlan(seed=7, drop=0.01, spare=10)):
...     comm = await kvwire.open(name="prefill-0")
...     address = await comm.listen("inproc://")

A plan breaks only the first promise of :mod:`kvwire.backend`: frames are lost, late,
out of order, doubled or changed, or the link stalls or dies. Memory is lent and given
back as promised. The ``inproc`` backend carries out the plans, because only there a
fault hits the same frame in every run.

The type lives with that backend, since a backend imports nothing of this package.
"""

from kvwire_inproc import FaultPlan, injected

__all__ = ["FaultPlan", "injected"]
