"""Roles of docstrings, as ``:class:`Engine```, as code that Markdown knows."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object

from tests.support.docs_site import plain


class Roles(Extension):
    """Changes each docstring that is rendered."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called with everything that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
