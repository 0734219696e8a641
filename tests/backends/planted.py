"""Bugs planted in a reference backend, and the checks that must find each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


class Plants:
    """The bugs of one test module."""

    def __init__(self) -> None:
        self.bugs: list[tuple[Plant, tuple[str, ...]]] = []
        self._descriptors: list[int] = []

    def caught_by(self, *checks: str) -> Callable[[Plant], Plant]:
        """Register a bug with the checks that must each find it."""

        def register(plant: Plant) -> Plant:
            self.bugs.append((plant, checks))
            return plant

        return register

    def instead_of(
        self, right: Any, *checks: str
    ) -> Callable[[Callable[..., Any]], Plant]:
        """Register what a bug makes of a method; it is passed the right one first."""

        owner_name, name = right.__qualname__.split(".")

        def register(bug: Callable[..., Any]) -> Plant:
            def plant(patch: pytest.MonkeyPatch) -> None:
                owner = getattr(sys.modules[right.__module__], owner_name)
                patch.setattr(owner, name, lambda *a, **named: bug(right, *a, **named))

            plant.__name__ = bug.__name__
            return self.caught_by(*checks)(plant)

        return register

    def leak_a_descriptor(self) -> None:
        """Open a file that nobody closes before :meth:`clean_up`."""
        self._descriptors.append(os.open(os.devnull, os.O_RDONLY))

    def clean_up(self) -> None:
        """Take back what bugs have left."""
        while self._descriptors:
            os.close(self._descriptors.pop())
