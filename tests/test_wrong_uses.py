"""Whoever uses kvwire wrongly is told so at once, in words that help.

The rows are those of support/wrong_uses/uses.md, done as they stand there: one that
is a call, such as ``conn.send(-1, b'x')``, by reading it, others by the step of their
name.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

import kvwire
import kvwire_store
from kvwire.config import FIELDS, ConfigOptions
from tests.support.tree import ROOT
from tests.support.waiting import PATIENCE_S
from tests.support.wrong_uses.steps import STEPS
from tests.support.wrong_uses.things import NAMES, Things, things

_ROW: Final = re.compile(r"^\| `?(.+?)`? \| `(\w+)` \| (.+) \|$", re.MULTILINE)
_VARIABLE: Final = re.compile(r"(KVWIRE_\w+)=(.*)")


class Row(NamedTuple):
    """Holds what is done, the error's class, and words that it has."""

    use: str
    error: str
    words: str


_PAGE = (ROOT / "tests" / "support" / "wrong_uses" / "uses.md").read_text()
ROWS = [Row(*found) for found in _ROW.findall(_PAGE)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.use[:40])
# Threads of a row have loops of their own.
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_wrong_use_is_told(row: Row, tmp_path: Path) -> None:
    async with things(tmp_path) as there, asyncio.timeout(PATIENCE_S):
        try:
            said = _do(row.use, there)
            if inspect.isawaitable(said):
                said = await said
            assert isinstance(said, kvwire.Outcome)
            assert not said.complete
            words = "; ".join(said.missing.reasons)
        except kvwire.KVWireError as exc:
            said, words = exc, str(exc)
    assert type(said).__name__ == row.error
    assert row.words in words


async def test_a_message_that_does_not_fit_says_how_to_receive_it(
    tmp_path: Path,
) -> None:
    async with things(tmp_path) as there:
        await there.back.send(1, bytes(100))
        with pytest.raises(kvwire.MessageTooLarge, match="a receive without `into`"):
            await there.conn.recv(1, into=bytearray(10))
        assert await there.conn.recv(1) == bytes(100)


async def test_a_codec_at_one_end_is_named_as_the_reason(tmp_path: Path) -> None:
    async with things(tmp_path) as there:
        there.b.publish("x", there.kv, [0], codec="int8")
        outcome = await there.conn.pull("x", there.kv, [0])
        assert "pass the same codec= at both ends" in outcome.missing.reasons[0]
        assert "head_dim" not in outcome.missing.reasons[0]


@pytest.mark.parametrize("like", [bytes, str, list, dict, kvwire.Outcome, Path])
async def test_a_library_may_ask_any_object_what_it_can_do(
    like: type, tmp_path: Path
) -> None:
    """As json's, rich's and NumPy's ask with ``hasattr`` and ``getattr``."""
    async with things(tmp_path) as there:
        out = there.b.publish("x", there.kv, [0])
        inc = there.conn.pull("x", there.kv, [1])
        memory = there.b.register(bytearray(8), "readwrite")
        asked = (
            *(there.a, there.conn, there.kv, out, inc, memory, kvwire.join(inc)),
            *(there.conn.recv(1), there.a.connections(), kvwire.open()),
        )
        for found in asked:
            for name in {*dir(found), *dir(like), "shape", "__array__", "no_such"}:
                hasattr(found, name)  # an error of any other kind passes through
            assert not hasattr(found, "no_such")
            assert getattr(found, "no_such", like) is like


async def test_async_with_an_engine_names_the_other_two_ways() -> None:
    told = pytest.raises(kvwire.UsageError, match=r"`with kvwire\.Engine\(\)`")
    with kvwire.Engine() as engine, told:
        async with engine:  # type: ignore[attr-defined]
            pass


def test_the_rows_are_all_there_and_different() -> None:
    uses = [row.use for row in ROWS]
    # One that is written in another way would be none, and not be done.
    assert len(uses) == len(re.findall(r"^\| (?!use |---)", _PAGE, re.MULTILINE))
    assert len(uses) >= 120
    assert len(set(uses)) == len(uses)
    assert STEPS.keys() <= set(uses)


def _do(use: str, t: Things) -> Any:
    """Do what a row says; what can be awaited is for the caller to await."""
    if use in STEPS:
        return STEPS[use](t)
    if variable := _VARIABLE.fullmatch(use):
        return kvwire.Config.load(environment={variable[1]: variable[2]})
    call = use.removeprefix("with ")
    value = _value(ast.parse(call, mode="eval").body, t)
    return value if call == use else value.__enter__()


def _value(node: ast.expr, t: Things) -> Any:
    match node:
        case ast.Name(id=name):
            if name in NAMES:
                return NAMES[name](t)
            if hasattr(builtins, name) and not hasattr(kvwire, name):
                return getattr(builtins, name)
            stored = name in kvwire_store.__all__
            return getattr(kvwire_store if stored else kvwire, name)
        case ast.Attribute(value=inner, attr=name):
            return getattr(_value(inner, t), name)
        case ast.Call(func=func, args=given, keywords=options):
            arguments = [_value(one, t) for one in given]
            named = {str(one.arg): _value(one.value, t) for one in options}
            return _value(func, t)(*arguments, **named)
        case ast.Await(value=inner):
            return _value(inner, t)
        case _:
            return ast.literal_eval(node)


# --- A misspelt name is a type error; tests/test_wrong_uses.py has what is said of it


if TYPE_CHECKING:

    def misspelt(
        conn: kvwire.Connection, comm: kvwire.Communicator, cache: kvwire.PagedCache
    ) -> Any:
        kvwire.open(lane=4)  # type: ignore[call-arg]
        kvwire.open(trust="pks")  # type: ignore[arg-type]
        kvwire.open(checksum="sample")  # type: ignore[arg-type]
        kvwire.Engine(lane=4)  # type: ignore[call-arg]
        kvwire.KVSpec(
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_tokens=1,
            dtype="flot16",  # type: ignore[arg-type]
        )
        kvwire.PagedCache(cache.spec, [], layout="NDH")  # type: ignore[arg-type]
        conn.send(1, "text")  # type: ignore[arg-type]
        comm.register(bytearray(1), "reed")  # type: ignore[arg-type]
        conn.pull("x", cache, [1], prioriy=3)  # type: ignore[call-arg]
        conn.push("x", cache, [1], consumers=2)  # type: ignore[call-arg]
        comm.publish("x", cache, [1], have=[])  # type: ignore[call-arg]
        comm.expect("x", cache, [1], growing=1)  # type: ignore[call-arg]
        kvwire_store.BlockStore.open([], write="bak")  # type: ignore[arg-type]


def test_the_options_of_open_are_the_keys_of_its_configuration() -> None:
    assert ConfigOptions.__optional_keys__ == FIELDS
