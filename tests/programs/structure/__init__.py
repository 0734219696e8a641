"""The shape of kvwire in numbers, by ``make check``; each has a ceiling.

A *room* is a direct child of ``kvwire``; all backends are one. There is an *arrow* from
one room to another if a file of the one imports a file of the other. *Floors* are the
rooms of the longest chain of arrows. A *ring* is a set of files that reach each other
by imports, also by those for annotations only. ``kvwire/__init__.py`` is in no ring: it
lists the public names, and imports each when it is used.

Tests are counted by folder: lines inside test functions and around them.
"""

from __future__ import annotations
