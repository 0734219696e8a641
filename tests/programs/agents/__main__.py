"""Sessions of agents on a real engine: what a call after a tool's pause costs.

``python -m tests.programs.agents``, where vLLM is installed. One trace is played four
times, on engines that have the same core and work in turns:

* ``own cache``: vLLM alone, with a cache that has room for all sessions. Each call
  after a pause is a hit in the engine's own cache.
* ``alone``: vLLM alone, with a cache for a few sessions.
* ``store``: the same cache, and a store with a server. The engine loads what its own
  cache has lost when it is asked for it.
* ``hints``: likewise, and sessions say what comes: that they wait for a tool (retain),
  that its output is about to arrive (`/copy-ahead`), that they are over (demote).

Only ``hints`` goes through the proxy. ``--arms proxy`` adds the first engine behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx

from tests.programs.agents.trace import Played, Player, Session, draw
from tests.programs.failover.arena import connector
from tests.support.engines.hints import envelope
from tests.support.engines.models import make_model
from tests.support.engines.nursery import Nursery
from tests.support.engines.pairs import running
from tests.support.engines.serving import Engine, before, engine, front, metric_of
from tests.support.engines.store_server import StoreServer

ARMS: Final = ("own cache", "hints", "store", "alone", "proxy")
# Those that are asked through the proxy; the others have nothing of kvwire before them.
_BEHIND: Final = ("hints", "proxy")
_SOURCES: Final = ("local_compute", "external_kv_transfer", "local_cache_hit")
# Of 128 tokens each: a tenth of what 100 sessions have.
_FEW_BLOCKS: Final = "96"
# How long a session may wait for its tool.
_WAITS_S: Final = 60


def main() -> int:
    """Run it; the exit status is 1 if an answer differs between arms."""
    options = _options()
    sizes = options.seed, options.prompt_tokens
    trace = draw(options.sessions, options.tools, options.each, *sizes)
    found: dict[str, Played] = {}
    with tempfile.TemporaryDirectory(prefix="kvwire-agents-") as made:
        model = make_model("wide", Path(made), num_hidden_layers=options.layers)
        try:
            run(model, Path(made), options.arms, trace, options.lead, found)
        finally:
            print(table(found))
    if options.json:
        said = {arm: asdict(played) for arm, played in found.items()}
        options.json.write_text(json.dumps(said | {"load": os.getloadavg()}))
    differ = sum(
        len({tuple(one) for one in answers}) > 1
        for answers in zip(*(one.answers for one in found.values()), strict=True)
    )
    print(f"{differ} of {len(trace)} sessions differ between the arms")
    return int(differ > 0)


def run(
    model: Path,
    folder: Path,
    arms: list[str],
    trace: list[Session],
    lead_s: float,
    found: dict[str, Played],
) -> None:
    """Play a trace on engines, and add what was found."""
    server = StoreServer(folder, memory="128MiB", disk="2GiB")
    few = ("--num-gpu-blocks-override", _FEW_BLOCKS)
    store = connector(server.address)
    over = engine(model, folder, "over", 0, {}, *few, alone=store)
    own = _alone(model, folder, "own")
    engines = {
        "own cache": own,
        "hints": over,
        "store": over,
        "alone": _alone(model, folder, "alone", *few),
        "proxy": own,
    }
    used = {one.url: one for one in map(engines.get, arms) if one is not None}
    # A client says which hints its requests carry, and the proxy passes them on.
    ahead = ("--kv-hints", "--copy-ahead", "hot-prefixes")
    proxies = {
        url: front(folder, *before([one], ["decode"]), *ahead)
        for url, one in used.items()
    }
    try:
        with (
            Nursery() as nursery,
            running(*used.values(), *proxies.values(), starter=nursery.start),
        ):
            for url in (*used, *(proxy.url for proxy in proxies.values())):
                Player(url).play(draw(4, 0, 0.1, 10**6))  # warms it up
            for arm in arms:
                one = engines[arm]
                url = proxies[one.url].url if arm in _BEHIND else one.url
                player = Player(url, {"cache_salt": arm})
                if arm == "hints":
                    player = _hinting(url, arm, lead_s)
                had = _tokens(one)
                played = found[arm] = player.play(trace)
                played.tokens = _tokens(one)
                played.tokens.subtract(had)
                print(f"{arm}: {line(played)}", flush=True)
    finally:
        server.kill()


def line(one: Played) -> str:
    """What was found, in a line."""
    return (
        f"to the first token after a call {one.median_s * 1e3:.0f} ms, nine of ten "
        f"within {one.p90_s * 1e3:.0f} ms"
    )


def table(found: Mapping[str, Played]) -> str:
    """All arms, as Markdown."""
    if not found:
        return ""
    least = found.get(ARMS[0], next(iter(found.values())))
    rows = [
        f"| {arm} | {one.median_s * 1e3:.0f} ms | {one.median_s / least.median_s:.2f} "
        f"| {one.p90_s * 1e3:.0f} ms | {one.p90_s / least.p90_s:.2f} | "
        + " | ".join(f"{one.tokens.get(name, 0):,}" for name in _SOURCES)
        + f" | {one.announced} |"
        for arm, one in found.items()
    ]
    head = (
        "| | median | to own cache | nine of ten | to own cache | tokens computed "
        "| loaded | in its cache | announced |"
    )
    return "\n".join(["", head, "|---|" + "--:|" * 8, *rows])


def _tokens(one: Engine) -> Counter[str]:
    """Where the tokens of an engine's prompts came from."""
    text = one.metrics()
    name = "vllm:prompt_tokens_by_source_total"
    return Counter(
        {kind: int(metric_of(text, name, f'source="{kind}"')) for kind in _SOURCES}
    )


def _alone(model: Path, folder: Path, name: str, *arguments: str) -> Engine:
    """An engine without any connector."""
    made = engine(model, folder, name, 0, {}, *arguments, alone={})
    at = made.command.index("--kv-transfer-config")
    del made.command[at : at + 2]
    return made


def _hinting(url: str, salt: str, lead_s: float) -> Player:
    """Sessions that say what comes."""

    async def announce(client: httpx.AsyncClient, ids: list[int]) -> bool:
        body = {"model": "m", "prompt": ids, "cache_salt": salt}
        said = await client.post(f"{url}/copy-ahead", json=body)
        assert said.status_code == 202, said.text
        return bool(said.json()["begun"])

    retain = {"priority": 80, "ttl_s": _WAITS_S}
    return Player(
        url,
        {"cache_salt": salt},
        waits=_hint("kv.retain", retain),
        ends=_hint("kv.demote", {}),
        announce=announce,
        lead_s=lead_s,
    )


def _hint(action: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"kv_hints": envelope({"action_type": action, "payload": payload})}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.programs.agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--tools", type=int, default=2, help="calls of each session")
    parser.add_argument(
        "--each", type=float, default=0.6, help="seconds between two new sessions"
    )
    parser.add_argument(
        "--lead", type=float, default=1.0, help="seconds from an announcement to a call"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=750, help="of a session's first prompt"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--arms", nargs="+", default=ARMS[:4], choices=ARMS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where every figure goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
