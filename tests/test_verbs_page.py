"""docs/reference/verbs.md: each call on it exists, and takes what the page gives it."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any, Final

import kvwire
import kvwire_store
from tests.support.tree import ROOT

PAGE: Final = (ROOT / "docs" / "reference" / "verbs.md").read_text()
OBJECTS: Final[dict[str, list[Any]]] = {
    "comm": [kvwire.Communicator],
    "conn": [kvwire.Connection, kvwire.Peer],
    "region": [kvwire.Region],
    "window": [kvwire.Window],
    "remote": [kvwire.RemoteWindow],
    "store": [kvwire_store.BlockStore],
    "request": [kvwire.Request],
    "out": [kvwire.Outgoing, kvwire.EngineOutgoing],
    "inc": [kvwire.Incoming, kvwire.EngineIncoming],
    "engine": [kvwire.Engine],
}


def calls() -> list[ast.Call]:
    """Every call of the page, as `comm.listen(address)`."""
    spans = re.findall(r"`([^`]+\))`", PAGE)
    nodes = [
        node
        for span in spans
        for node in ast.walk(ast.parse(span.replace("=...", "=None")))
    ]
    return [node for node in nodes if isinstance(node, ast.Call)]


def test_each_call_is_one_of_its_class() -> None:
    checked = set()
    for call in calls():
        assert isinstance(call.func, ast.Attribute)
        assert isinstance(call.func.value, ast.Name)
        kinds = OBJECTS[call.func.value.id]
        name = call.func.attr
        checked.add(name)
        own = [method for kind in kinds if (method := getattr(kind, name, None))]
        assert own, f"{call.func.value.id}.{name}"
        # Without self.
        for method in own:
            keywords = {str(keyword.arg): None for keyword in call.keywords}
            inspect.signature(method).bind(None, *call.args, **keywords)
    assert len(checked) > 30


def test_the_page_has_every_verb() -> None:
    """Those of a connection and of a peer, with their other halves."""
    here = {call.func.attr for call in calls() if isinstance(call.func, ast.Attribute)}
    verbs = {"send", "recv", "put", "get", "window", "pull", "push"}
    assert verbs <= {name for name in vars(kvwire.Peer) if name[0] != "_"}
    assert verbs <= here
    assert {"publish", "expect", "register", "expose", "announce", "listen"} <= here


def test_threads_have_the_calls_of_the_page() -> None:
    text = PAGE.partition("## From threads")[2]
    names = re.search(r"has (.+?), which", text.replace("\n", " "))
    assert names is not None
    listed = re.findall(r"`(\w+)`", names[1])
    assert listed
    assert all(hasattr(kvwire.Engine, name) for name in listed), listed
