"""States that are set and stay: each ends with its object, or has its reason.

A state that nobody examines again turns one failure into a lasting one: a lane that is
not asked for any more, an engine that drained, a tier that is degraded. So every flag
that a class sets, and never clears, is in a table here with the reason why it stays.
"""

from __future__ import annotations

import ast

from tests.support.tree import ROOT


def test_what_is_set_and_never_cleared_has_its_reason() -> None:
    # An object that has ended does not begin again; another one takes its place.
    ended = (
        "aborted",
        "aborting",
        "closed",
        "closing",
        "ended",
        "ending",
        "gone",
        "over",
    )
    ends = {"stopped", "_stopped", *ended, *(f"_{word}" for word in ended)}
    # The others, each with the reason why it stays.
    stay = {
        "aio.CallThreads._started": "a thread of it lives until all calls are made",
        "aio.Opening._begun": "an opening is entered once; another call makes another",
        "selection.Selection._carries": "the settings allow it, and they do not change",
        "members.Members.doubts": "its directory clears it when all are read",
        "state.LaneSet.initial_set_done": "a connection chooses its transport once",
        "io_thread.IOThread._begun": "a thread starts once",
        "lanes.LaneTable.initial_set_done": "a connection chooses its transport once",
        "messages.Messages._refusing": "its connection is closing",
        "leg.Leg.planned": "the same two ends have the same plan on every link",
        "ready_log.ReadyLog.finished": "what was finished is complete",
        "ready_log.ReadyLog.woken": "the loop clears it when it reads the log",
        "transfer.Transfer._is_drained": "nothing touches memory that has drained",
        "faults.FaultyPipe._stalled": "a planned fault, for tests",
        "pipe.InprocPipe._finishing": "its sender has ended",
        "pipe.InprocPipe._retired": "its receiver has ended",
        "driver.NixlDriver._made": "an agent is made once",
        "driver.NixlDriver._joined": "a peer's agent is loaded once, for its lane",
        "lane.NixlLane._started": "a lane starts once",
        "duplex.Duplex._started": "a stream starts once",
        "duplex.Duplex._end_of_stream": "nothing comes after the end of a stream",
        "duplex.Duplex._shut": "nothing is sent after the end of a stream",
        "lane.TcpLane._joined": "its socket has arrived; another lane has its own",
        "link.TcpLink._watching": "its socket is watched until the link ends",
        "tls_wire.TlsWire.opened": "a handshake is made once",
        "tls_wire.TlsWire._end_sent": "nothing is sent after the end of a stream",
        "lane.UcxLane._given": "its half of a lane was given away, once",
        "lane.UcxLane._peer_has_left": "a peer that has left its lane does not return",
        "worker.UcxEndpoint.failed": "UCX has closed it; another lane has its own",
        "command._Progress.interrupted": "its run ends",
        "sides.LinkSide.begun": "a side of a case begins once",
        "sides.LaneSide.begun": "a side of a case begins once",
        "server.StoreServer._entered": "a server is entered once",
        "own_server.OwnServer.useless": "the setting names another engine",
        "own_server.OwnServer._warned": "the log has it once",
        "own_server.OwnRequest._cancelled": "a request that was cancelled has ended",
        "engines.VllmEngine.ready": "it has been up once; `down` says whether it is",
        "receiving.PromptReceive._begun": "a prompt is received once",
        "sending.PromptSend.finished": "what was finished is complete",
        "sending.PromptSend._begun": "a prompt is sent once",
    }
    found = set[str]()
    tops = [ROOT / "kvwire", ROOT / "backends", *ROOT.glob("packages/*/kvwire_*")]
    for path in (file for top in tops for file in top.rglob("*.py")):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.ClassDef):
                kept = latches(each) - ends
                found |= {f"{path.stem}.{each.name}.{name}" for name in kept}
    new = found - stay.keys()
    assert not new, "clear it, and show that by a test, or say why it stays"
    assert not stay.keys() - found, "these are cleared now, or have gone"


def latches(of: ast.ClassDef) -> set[str]:
    """Attributes that methods set to True, and none of them to anything else."""
    methods = (
        node
        for node in of.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name != "__init__"
    )
    values: dict[str, set[object]] = {}
    for node in (node for method in methods for node in ast.walk(method)):
        match node:
            case ast.Assign(targets=targets, value=ast.Constant(value=value)):
                pass
            case ast.Assign(targets=targets):
                value = None
            case _:
                continue
        for target in targets:
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    values.setdefault(name, set()).add(value)
    return {name for name, found in values.items() if found == {True}}
