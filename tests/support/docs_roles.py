"""What the pages of the API show of kvwire's code.

Roles of docstrings, as ``:class:`Engine```, become code that Markdown knows. The
options of a transfer, ``**options: Unpack[PublishOptions]``, are shown one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from griffe import (
    Class,
    ExprName,
    ExprSubscript,
    Extension,
    Function,
    Object,
    Parameter,
    ParameterKind,
)

from tests.support.docs_site import plain


class Roles(Extension):
    """Changes each docstring that is rendered."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called with everything that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)

    def on_package(self, *, pkg: Object, **_: Any) -> None:
        """Called when the whole of kvwire has been read."""
        for thing in list(_within(pkg)):
            if isinstance(thing, Function):
                _unpack(thing)


def _within(thing: Object) -> Iterator[Object]:
    for member in thing.members.values():
        if isinstance(member, Object):
            yield member
            yield from _within(member)


def _unpack(function: Function) -> None:
    """Write ``**options`` as the keyword arguments that they are.

    Keys of the configuration are left as they are: they have a page of their own.
    """
    found = [
        one for one in function.parameters if one.kind is ParameterKind.var_keyword
    ]
    for parameter in found:
        kind = parameter.annotation
        if not isinstance(kind, ExprSubscript) or str(kind.left) != "Unpack":
            continue
        if not isinstance(kind.slice, ExprName) or str(kind.slice) == "ConfigOptions":
            continue
        options = function.modules_collection[kind.slice.canonical_path]
        del function.parameters[parameter.name]
        for name, attribute in _options(options).items():
            function.parameters.add(
                Parameter(
                    name,
                    annotation=attribute.annotation,
                    kind=ParameterKind.keyword_only,
                    default="...",
                )
            )


def _options(kind: Class) -> dict[str, Any]:
    """The keys of a TypedDict, those of its bases first."""
    bases = [base for base in kind.resolved_bases if isinstance(base, Class)]
    found = {name: key for base in bases for name, key in _options(base).items()}
    keys = {name: one for name, one in kind.members.items() if one.is_attribute}
    return found | keys
