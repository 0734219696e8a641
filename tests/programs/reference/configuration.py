"""docs/reference/configuration.md: the keys of ``kvwire.Config``."""

from __future__ import annotations

from typing import Any

import msgspec

from kvwire import Config, limits
from kvwire_vllm.config import VllmSettings
from tests.programs.reference import words


def page() -> str:
    return words.page("configuration.md", _keys_of_config(), _keys_of_the_connector())


def _keys_of_config() -> str:
    texts = words.attributes(Config)
    model = msgspec.inspect.type_info(Config)
    assert isinstance(model, msgspec.inspect.StructType)
    rows = [
        (
            words.anchored(key.name),
            _shown(key.name, key.default),
            _range(key.name, key.type),
            texts[key.name],
        )
        for key in model.fields
    ]
    return words.table(("key", "default", "may be", ""), rows)


def _keys_of_the_connector() -> str:
    texts = words.attributes(VllmSettings)
    rows = [
        (words.anchored(key.name), _shown(key.name, key.default), texts[key.name])
        for key in msgspec.structs.fields(VllmSettings)
    ]
    return words.table(("key", "default", ""), rows)


def _shown(key: str, default: Any) -> str:
    """A default as TOML has it; nothing where there is none."""
    if default in ("", (), None) or default is msgspec.NODEFAULT:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, str):
        return f'`"{default}"`'
    if isinstance(default, int):
        size = _number(key, default)
        return f"`{default}`" + (f" ({size})" if "iB" in size else "")
    return f"`{default:g}`"


def _range(key: str, kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return ", ".join(f'`"{value}"`' for value in values)
        case msgspec.inspect.BoolType():
            return "`true`, `false`"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return _bounds(key, kind)
        case msgspec.inspect.StrType(max_length=longest):
            return "text" if longest is None else f"text, at most {longest} characters"
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"a list: {_range(key, item)}"
        case msgspec.inspect.DictType(value_type=value):
            return f"a table: {_range(key, value)}"
    raise TypeError(f"{kind} is not described yet")


def _bounds(key: str, kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    if kind.gt is not None and kind.le is not None:
        return f"above {_number(key, kind.gt)}, at most {_number(key, kind.le)}"
    assert kind.ge is not None, f"{key} is not described yet"
    low = _number(key, kind.ge)
    return f"{low} and more" if kind.le is None else f"{low} to {_number(key, kind.le)}"


def _number(key: str, number: float) -> str:
    """Write a number; those that count bytes as people say them."""
    units = ((limits.GIB, "GiB"), (limits.MIB, "MiB"), (limits.KIB, "KiB"))
    for unit, name in units if key.endswith("_bytes") else ():
        if number >= unit and number % unit == 0:
            return f"{number / unit:,g} {name}"
    return f"{number:,.15g}"
