"""Bugs planted in a reference backend; each is a test that the kit's checks find it.

A plant changes one method of the reference backend, the way a real backend gets it
wrong. Every check that a plant names passes on the reference as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvwire_certify.conformance import Report

Plant = Callable[[pytest.MonkeyPatch], None]
Kit = Callable[..., Awaitable[Report]]
Found = Callable[[pytest.MonkeyPatch], Awaitable[None]]
# A planted bug may make the kit wait in vain; nothing here takes as long by itself.
_TIMEOUT_S = 0.4
_descriptors: list[int] = []


def expect_found(kit: Kit, *checks: str) -> Callable[[Plant], Found]:
    """Make a test of a bug: the checks of a kit must each find it."""

    def made(plant: Plant) -> Found:
        # The bugs are in code that treats all loops alike.
        @pytest.mark.asyncio(loop_factories=["asyncio"])
        async def test(monkeypatch: pytest.MonkeyPatch) -> None:
            for check in checks:
                with monkeypatch.context() as patch:
                    plant(patch)
                    report = await kit(
                        "inproc", only=[check], timeout_s=_TIMEOUT_S, raising=False
                    )
                while _descriptors:
                    os.close(_descriptors.pop())
                (failed,) = report.failed
                # It was the backend that failed, not the plant.
                assert not failed.reason.startswith(("AttributeError", "NameError"))

        test.__name__ = plant.__name__
        found: Found = test
        return found

    return made


def planted_in(right: Any, bug: Callable[..., Any]) -> Plant:
    """What a bug makes of a method or a property; it is passed the right one first."""
    computed = isinstance(right, property)
    right = right.fget if computed else right
    owner_name, name = right.__qualname__.split(".")

    def wrong(*arguments: Any, **named: Any) -> Any:
        return bug(right, *arguments, **named)

    def plant(patch: pytest.MonkeyPatch) -> None:
        owner = getattr(sys.modules[right.__module__], owner_name)
        patch.setattr(owner, name, property(wrong) if computed else wrong)

    plant.__name__ = bug.__name__
    return plant


def expect_found_in(
    right: Any, kit: Kit, *checks: str
) -> Callable[[Callable[..., Any]], Found]:
    """Make a test of what a bug makes of a method."""
    return lambda bug: expect_found(kit, *checks)(planted_in(right, bug))


def leak_a_descriptor() -> None:
    """Open a file that nobody closes before the check is over."""
    _descriptors.append(os.open(os.devnull, os.O_RDONLY))
