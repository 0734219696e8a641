"""Deliberate faults from a seed: links that misbehave in ways that the core can detect.

>>> with injected(FaultPlan(seed=7, drop=0.01, spare=10)):
...     comm = await kvwire.open(name="prefill-0")
...     address = await comm.listen("inproc://")

A plan breaks only the first promise of :mod:`kvwire.backend`: frames are lost, late,
out of order, duplicated or changed, or the link stalls or dies. Memory is still lent
and given back as promised. The ``inproc`` backend executes the plans, because only
there does a fault hit the same frame in every run.

The type is defined with that backend, since backends import nothing from this package.
"""

from kvwire_inproc import FaultPlan, injected

__all__ = ["FaultPlan", "injected"]
