"""A class or function as Markdown: its signature, its docstring, its members."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Final

import msgspec

import kvwire

# A role names its target, or shows a text and has the target in brackets.
_ROLE: Final = re.compile(r":\w+:`~?([^`<]+?)(?: *<([^`>]+)>)?`")
_TITLES: Final = {"Args": "Arguments"}
_SECTION: Final = re.compile(
    r"^(Args|Attributes|Raises|Returns|Yields):\n", re.MULTILINE
)
# One argument, attribute or error, or several that share a text.
_ENTRY: Final = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)", re.DOTALL)
_SELF: Final = ("self", "cls")
_COLUMNS: Final = 72


@dataclasses.dataclass(frozen=True)
class Links:
    """Where names of the reference are explained.

    Attributes:
        pages: Each name's place, as ``page.md#name``.
        first: The name whose entry has the text, for each function that several classes
            may inherit.
    """

    pages: Mapping[str, str]
    first: Mapping[Any, str]


def found(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def imported(name: str) -> str:
    """How a program gets it; nothing where it writes ``kvwire.`` before the name."""
    module, _, short = name.rpartition(".")
    return "" if module == "kvwire" else f"from {module} import {short}"


def described(name: str, example: str, links: Links) -> str:
    """A public name, whole: below its docstring an example, then its members."""
    thing = found(name)
    short = name.rpartition(".")[2]
    parts = [
        f'## <a id="{name}"></a>`{short}`',
        f"`{imported(name)}`" if imported(name) else "",
    ]
    if not inspect.isclass(thing):
        parts.append(_fence(_function(short, thing)))
    elif constructor := _constructor(short, thing):
        parts.append(_fence(constructor))
    parts.append(prose(thing, name, links))
    parts.append(_constants(thing))
    parts.append(example)
    for member in members(thing):
        parts += _member(member, thing, name, links)
    return "\n\n".join(part for part in parts if part)


def members(thing: Any) -> Iterator[str]:
    """The public members of a class that have a docstring, those of its bases last."""
    if not inspect.isclass(thing):
        return
    # Python calls these of what is awaited, and nobody else does.
    seen = {"send", "throw", "close"} if issubclass(thing, Coroutine) else set[str]()
    for base in thing.__mro__:
        if not base.__module__.startswith("kvwire"):
            continue
        for name, member in vars(base).items():
            callable_ = callable(member) or isinstance(
                member, property | classmethod | staticmethod
            )
            if name[0] != "_" and name not in seen and callable_:
                seen.add(name)
                if getattr(thing, name).__doc__:
                    yield name


def _member(member: str, thing: type, name: str, links: Links) -> list[str]:
    own = inspect.getattr_static(thing, member)
    anchor = f'<a id="{name}.{member}"></a>'
    text = prose(getattr(thing, member), name, links)
    first = links.first[defined(own)]
    if first != f"{name}.{member}":
        text = f"See [`{'.'.join(first.split('.')[-2:])}`]({links.pages[first]})."
    if isinstance(own, property):
        assert own.fget is not None
        kind = _annotation(inspect.signature(own.fget).return_annotation)
        text = text.removeprefix("Return ")
        text = text[:1].upper() + text[1:]
        return [f"### {anchor}`{thing.__name__}.{member}: {kind}`", text]
    code = _function(member, defined(own))
    if isinstance(own, classmethod | staticmethod):
        code = f"@{type(own).__name__}\n{code}"
    return [f"### {anchor}`{thing.__name__}.{member}`", _fence(code), text]


def defined(own: Any) -> Any:
    """The function behind a member, the same in all classes that inherit it."""
    return getattr(own, "fget", None) or getattr(own, "__func__", own)


# --- signatures -----------------------------------------------------------------------


def _function(name: str, function: Any) -> str:
    """A function with each of its overloads, one argument a line."""
    forms = typing.get_overloads(inspect.unwrap(function)) or [function]
    return "\n".join(_form(name, form) for form in forms)


def _form(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    returned = _annotation(signature.return_annotation)
    bare = inspect.unwrap(function)
    begin = "async def" if inspect.iscoroutinefunction(bare) else "def"
    arguments = list(_arguments(signature, bare))
    return _laid_out(f"{begin} {name}(", arguments, f") -> {returned}: ...")


def _constructor(short: str, thing: type) -> str:
    """How a class is called; nothing where another call makes its objects."""
    text = inspect.getdoc(thing) or ""
    fields = "Attributes:\n" in text and (
        dataclasses.is_dataclass(thing)
        or issubclass(thing, msgspec.Struct)
        or hasattr(thing, "_fields")
    )
    if not fields and "Args:\n" not in text:
        return ""
    if thing is kvwire.open:
        arguments = list(_arguments(inspect.signature(thing), thing.__init__, thing))
        return _laid_out("async def open(", arguments, ") -> Communicator: ...")
    initial = vars(thing).get("__init__", thing)
    arguments = list(_arguments(inspect.signature(thing), initial, thing))
    text = _laid_out("def __init__(", ["self", *arguments], ") -> None: ...")
    return f"class {short}:\n{textwrap.indent(text, '    ')}"


def _laid_out(begin: str, arguments: list[str], end: str) -> str:
    line = begin + ", ".join(arguments) + end
    if len(arguments) < 3 and len(line) <= _COLUMNS:
        return line
    lines = "".join(
        f"    {argument}\n" if argument[0] == "#" else f"    {argument},\n"
        for argument in arguments
    )
    return f"{begin}\n{lines}{end}"


def _arguments(
    signature: inspect.Signature, function: Any, cls: type | None = None
) -> Iterator[str]:
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name in _SELF:
            continue
        annotation = _annotation(parameter.annotation, cls, parameter.name)
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
            yield f"*{parameter.name}: {annotation}"
        elif parameter.kind is parameter.VAR_KEYWORD:
            if annotation.startswith("Unpack["):
                options = list(_options(function, annotation[len("Unpack[") : -1]))
                if not starred and options[0][0] != "#":
                    yield "*"
                yield from options
            else:
                yield f"**{parameter.name}: {annotation}"
        else:
            yield f"{parameter.name}: {annotation}{_default(parameter.default)}"


def _options(function: Any, name: str) -> Iterator[str]:
    """The keys of a TypedDict as keyword arguments; Config has their defaults."""
    kind = inspect.unwrap(function).__globals__[name]
    defaults: dict[str, Any] = {}
    if name == "ConfigOptions":
        if function is not kvwire.open.__init__:
            yield "# and keys of Config, as of kvwire.open"
            return
        fields = msgspec.structs.fields(kvwire.Config)
        defaults = {field.name: field.default for field in fields}
    for key, annotation in kind.__annotations__.items():
        default = _default(defaults[key]) if key in defaults else " = ..."
        yield f"{key}: {_annotation(annotation)}{default}"


def _annotation(annotation: Any, cls: type | None = None, name: str = "") -> str:
    """A type as the source has it, without what only msgspec reads."""
    if cls is not None and not isinstance(annotation, str):
        for base in cls.__mro__:
            own = vars(base).get("__annotations__", {}).get(name)
            if isinstance(own, str):
                annotation = own
                break
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if annotation is inspect.Signature.empty:
        return "None"
    text = (
        annotation
        if isinstance(annotation, str)
        else inspect.formatannotation(annotation)
    )
    tree = ast.parse(text, mode="eval")
    return ast.unparse(_Bare().visit(tree))


class _Bare(ast.NodeTransformer):
    """Keeps the type of ``Annotated[type, ...]``, and drops modules of names."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            assert isinstance(node.slice, ast.Tuple)
            return node.slice.elts[0]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr)


def _default(default: Any) -> str:
    if default is inspect.Parameter.empty or default is msgspec.NODEFAULT:
        return ""
    if isinstance(default, enum.Enum):
        return f" = {default}"
    if isinstance(default, str):
        return f' = "{default}"'
    text = repr(default)
    return " = ..." if text[0] == "<" else f" = {text}"


def _constants(thing: Any) -> str:
    """The members of an enum."""
    if not inspect.isclass(thing) or not issubclass(thing, enum.Enum):
        return ""
    return "Values: " + ", ".join(f"`{one.name}`" for one in thing) + "."


def _fence(code: str) -> str:
    return f"<!-- fragment -->\n```python\n{code}\n```"


# --- docstrings -----------------------------------------------------------------------


def prose(thing: Any, owner: str, links: Links) -> str:
    """A docstring as Markdown; ``owner`` is the class whose members have no prefix."""
    text = inspect.getdoc(thing)
    assert text is not None, f"{thing!r} has no docstring"
    text = _linked(text, owner, links)
    parts = _SECTION.split(text)
    written = [_paragraphs(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        inside, after = _split(body)
        written += [
            f"**{_TITLES.get(title, title)}**",
            _entries(inside),
            _paragraphs(after),
        ]
    return "\n\n".join(part for part in written if part)


def _split(body: str) -> tuple[str, str]:
    """A section, and the paragraphs after it, which are not indented."""
    end = re.search(r"^(?=\S)", body, re.MULTILINE)
    at = end.start() if end else len(body)
    return textwrap.dedent(body[:at]).strip(), body[at:].strip()


def _entries(text: str) -> str:
    """Entries begin without an indent: ``name: text``; other text is a paragraph."""
    entries = re.split(r"\n(?=\S)", text)
    if not _ENTRY.match(entries[0]):
        return text
    lines = []
    for entry in entries:
        match = _ENTRY.match(entry)
        assert match is not None, entry
        names = ", ".join(f"`{name}`" for name in match[1].split(", "))
        first, *more = match[2].split("\n")
        below = textwrap.dedent("\n".join(more))
        lines.append(
            f"* {names}: {first}" + textwrap.indent(f"\n{below}" if below else "", "  ")
        )
    return "\n".join(lines)


def _paragraphs(text: str) -> str:
    """Paragraphs as they are; an indented example after ``::`` becomes a block."""
    pieces = re.split(r"::\n\n((?:(?: {4}.*)?\n)*(?: {4}.*))", text)
    out = pieces[0]
    for code, after in zip(pieces[1::2], pieces[2::2], strict=True):
        out += f":\n\n{_fence(textwrap.dedent(code).strip())}{after}"
    return re.sub(r"^(Cancel safety:.*\n) {4}", r"\1", out, flags=re.MULTILINE).strip()


def _linked(text: str, owner: str, links: Links) -> str:
    """Roles as links to where the reference explains their target, or as code."""

    def lead(role: re.Match[str]) -> str:
        target = (role[2] or role[1]).strip()
        shown = role[1].strip() if role[2] else target
        for name in (target, f"{owner}.{target}", f"kvwire.{target}"):
            if name in links.pages:
                return f"[`{shown.removeprefix('kvwire.')}`]({links.pages[name]})"
        return f"`{shown}`"

    return _ROLE.sub(lead, text).replace("``", "`")
