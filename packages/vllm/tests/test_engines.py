"""Real vLLM engines: what decode makes of fetched KV is what it makes of its own."""

from __future__ import annotations

import asyncio
import json
import random
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import kvwire
from kvwire.aio import gather_all
from packages.vllm.tests.support.models import (
    EOS_TOKEN,
    make_model,
    write_byte_tokenizer,
)
from packages.vllm.tests.support.pairs import Pair, running
from packages.vllm.tests.support.relay import BLOCK_TOKENS, Relay
from packages.vllm.tests.support.serving import (
    ANSWERS_WITHIN_S,
    NEEDS_VLLM,
    Engine,
    Front,
    Process,
    asked,
    before,
    complete,
    engine,
    front,
    metric_of,
    prompt,
    tokens_of,
)
from tests.support.servers import free_port
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM]
# Not the default, so that a transfer whose peer was killed is over within a test.
LEASE_S = 3.0


class Found(Pair):
    proxy: Front
    events: str

    def both(
        self, ids: list[int], there: str = "", back: str = "", **more: Any
    ) -> list[int]:
        return tokens_of(complete(self.proxy.url, ids, **more))


class Collector(HTTPServer):
    """Keeps what is said to a collector of OpenTelemetry."""

    said = b""


class _Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.said += self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Write no line for each request."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector(("127.0.0.1", 0), _Export) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Found]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model("gqa", folder)
    write_byte_tokenizer(model)
    transfer = {"lease_s": LEASE_S, "require": ["tcp"]}
    traces = (
        "--otlp-traces-endpoint",
        f"http://127.0.0.1:{collector.server_port}/v1/traces",
    )
    long = ("--max-model-len", "8192")
    prefill = engine(model, folder, "prefill", 0, transfer, *traces, *long)
    replay, endpoint = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    said = {"enable_kv_cache_events": True, "endpoint": endpoint}
    events = ("--kv-events-config", json.dumps({**said, "replay_endpoint": replay}))
    more = (*events, *traces, *long)
    decode = engine(model, folder, "decode", 1, transfer, *more, own=True)
    for one in (prefill, decode):
        one.environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
        one.environment["OTEL_BSP_SCHEDULE_DELAY"] = "200"
    made = Found(prefill, decode)
    made.proxy, made.events = front(folder, *before((prefill, decode))), replay
    with running(prefill, made.decode, made.proxy):
        yield made


def test_the_model_tells_prompts_apart(pair: Found) -> None:
    """Else the tests below would pass with any KV."""
    ids = prompt(300)
    other = [ids[0] + 1, *ids[1:]]
    assert pair.local(ids) != pair.local(other)


@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 1024, 1025, 4000])
def test_tokens_are_those_of_local_generation(pair: Found, length: int) -> None:
    """Blocks have 128 tokens and chunks 1,024, so 4,000 stream chunk by chunk."""
    ids = prompt(length, seed=1)
    hits = pair.fetched
    assert pair.both(ids) == pair.local(ids)
    fetched = pair.fetched - hits
    assert fetched == length


@pytest.mark.parametrize("back", [False, True])
def test_in_sequence(pair: Found, back: bool) -> None:
    """The answer of one says where the KV is; each engine can be either end."""
    ids = prompt(1500, seed=2 + back)
    first, then = pair.prefill, pair.decode
    if back:
        first, then = then, first
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    said = first.generate(ids, 1, kv_transfer_params=asked)
    answer = then.generate(ids, kv_transfer_params=said["kv_transfer_params"])
    assert tokens_of(answer) == pair.local(ids)


def test_probabilities_of_the_prompt_itself(pair: Found) -> None:
    """Whoever is asked for them computes the prompt; nobody waits for what it drops."""
    ids = prompt(700, seed=13)
    here = pair.prefill.generate(ids, cache_salt="here", prompt_logprobs=1)
    first = pair.prefill.generate(ids, 1, kv_transfer_params={"do_remote_decode": True})
    there = pair.decode.generate(
        ids, kv_transfer_params=first["kv_transfer_params"], prompt_logprobs=1
    )
    shared = complete(pair.proxy.url, ids, prompt_logprobs=1)
    for answer in (there, shared):
        assert tokens_of(answer) == tokens_of(here)
        assert _of_prompt(answer) == pytest.approx(_of_prompt(here), abs=1e-4)
    assert eventually(lambda: pair.idle)


def _of_prompt(answer: Any) -> list[float]:
    """The logarithm of each token's probability, but the first one's."""
    positions = answer["choices"][0]["prompt_logprobs"][1:]
    return [next(iter(position.values()))["logprob"] for position in positions]


def test_a_batch(pair: Found) -> None:
    pair.check_alike(range(103, 804, 100), seed=3)


_LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}
# What a request has beside its prompt, a limit and no temperature.
OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {
        "temperature": 0.8,
        "seed": 7,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
    },
    "one token": {"max_tokens": 1},
    "at least": {"min_tokens": 3, "ignore_eos": False},
    "ends at once": {"logit_bias": {str(EOS_TOKEN): 100}, "ignore_eos": False},
    "bias": {"logit_bias": {"77": 20}, "bad_words": ["e", "ab"]},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "stop": {"stop": ["e", "t", "a"], "include_stop_str_in_output": True},
    "stop tokens": {"stop_token_ids": list(range(5, 400))},
    "special": {"skip_special_tokens": False},
    "n": {"n": 2},
    "choice": {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
    "object": {"response_format": {"type": "json_object"}},
    "no such": {"temperature": -1},
}
OF_COMPLETIONS: dict[str, dict[str, Any]] = {
    "echo": {"echo": True},
    "no limit": {"max_tokens": None},
}
OF_CHATS: dict[str, dict[str, Any]] = {
    "newer name": {"max_completion_tokens": 4},
    "tools": {
        "tools": [{"type": "function", "function": _LOOK}],
        "tool_choice": "none",
    },
}


def answered(url: str, path: str, body: dict[str, Any]) -> Any:
    """An answer without its name, whether it came in one piece or as a stream."""
    said = httpx.post(url + path, json=body, timeout=ANSWERS_WITHIN_S)
    if not said.headers["content-type"].startswith("text/event-stream"):
        whole = said.json()
        return said.status_code, whole.get("choices") or whole["error"]
    events = [one.removeprefix("data: ") for one in said.text.strip().split("\n\n")]
    choices = [one for text in events[:-1] for one in json.loads(text)["choices"]]
    parts = [one.get("delta", one) for one in choices]
    texts = [part.get("content") or part.get("text") or "" for part in parts]
    return events[-1], "".join(texts), [one["finish_reason"] for one in choices][-1:]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "option"),
    [
        *(("/v1/completions", one) for one in OPTIONS | OF_COMPLETIONS),
        *(("/v1/chat/completions", one) for one in OPTIONS | OF_CHATS),
    ],
)
def test_requests_of_all_kinds(
    pair: Found, path: str, option: str, *, stream: bool
) -> None:
    """Answers with all kinds of options are those of one engine."""
    ids = prompt(130 + len(option), seed=len(path))
    body = asked(9) | {"return_token_ids": False, "stream": stream}
    body |= {"prompt": ids}
    if "chat" in path:
        del body["prompt"]
        text = "".join(chr(97 + one % 26) for one in ids)
        body["messages"] = [{"role": "user", "content": text}]
    body |= (OPTIONS | OF_COMPLETIONS | OF_CHATS)[option]
    here = answered(pair.prefill.url, path, body | {"cache_salt": f"alone {option}"})
    assert answered(pair.proxy.url, path, body) == here


def test_what_decode_has_is_not_sent_again(pair: Found) -> None:
    ids = prompt(900, seed=4)
    longer = ids + prompt(200, seed=5)
    assert pair.both(ids) == pair.local(ids)
    hits = pair.fetched
    assert pair.both(longer) == pair.local(longer)
    fetched = pair.fetched - hits
    # Seven blocks of 128 tokens were there.
    assert fetched == len(longer) - 896


def test_routers_hear_of_blocks_that_arrive(pair: Found) -> None:
    """From vLLM, once each; so the connector says nothing of them."""
    ids = prompt(300, seed=14)
    pair.both(ids)

    zmq = pytest.importorskip("zmq", reason="vLLM brings it")

    def stored() -> list[list[int]]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.rcvtimeo = 1000 * int(ANSWERS_WITHIN_S)
            asking.connect(pair.events)
            asking.send_multipart([b"", bytes(8)])
            told = iter(lambda: asking.recv_multipart()[2:], [b"\xff" * 8, b""])
            batches = [msgspec.msgpack.decode(batch) for _, batch in told]
        events = [one for _, events, *_ in batches for one in events]
        stored = [one["token_ids"] for one in events if one["type"] == "BlockStored"]
        return [tokens for tokens in stored if tokens[:9] == ids[:9]]

    assert eventually(lambda: stored() == [ids[:256]])


ROUTER = shutil.which("vllm-router", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(
    ROUTER is None, reason="vllm-router is not installed; `make test-vllm-router` does"
)
def test_a_router_of_others_in_the_place_of_the_proxy(
    pair: Found, tmp_path: Path
) -> None:
    """It takes us for NIXL: what prefill answers is given to decode as it is."""
    assert ROUTER is not None
    port = free_port()
    command = [
        *(ROUTER, "--vllm-pd-disaggregation", "--kv-connector", "nixl"),
        *("--prefill", pair.prefill.url, "--decode", pair.decode.url),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
        *("--prometheus-port", str(free_port())),
    ]
    url = f"http://127.0.0.1:{port}"
    router = Process(command, tmp_path / "router.log", url)
    with running(router):
        for length in (300, 1500):
            ids = prompt(length, seed=23)
            hits = pair.fetched
            answer = tokens_of(complete(url, ids))
            assert pair.fetched - hits == length
            assert answer == pair.local(ids)


def test_the_trace_of_a_client_has_both_ends(pair: Found, collector: Collector) -> None:
    """Each lies below the client's span, which a span names behind its trace."""
    trace, parent = secrets.token_bytes(16), secrets.token_bytes(8)
    named = {"traceparent": f"00-{trace.hex()}-{parent.hex()}-01"}
    with httpx.Client(headers=named) as client:
        complete(pair.proxy.url, prompt(300, seed=17), client=client)

    def seen(end: bytes) -> bool:
        span = re.escape(trace) + b".{10,14}" + re.escape(parent) + b"..kvwire " + end
        return bool(re.search(span, collector.said, re.DOTALL))

    assert eventually(lambda: seen(b"send") and seen(b"receive"))


def test_another_prompt_under_the_same_name_is_refused(pair: Found) -> None:
    """Decode computes what it was not given."""
    ids, other = prompt(600, seed=7), prompt(600, seed=8)
    asked = {"do_remote_decode": True}
    first = pair.prefill.generate(other, 1, kv_transfer_params=asked)
    answer = pair.decode.generate(ids, kv_transfer_params=first["kv_transfer_params"])
    assert tokens_of(answer) == pair.local(ids)
    assert eventually(lambda: pair.prefill.idle)


def test_nobody_comes_for_it(pair: Found) -> None:
    """Blocks that are not fetched are free when their lease is over."""
    pair.prefill.generate(
        prompt(300, seed=9), 1, kv_transfer_params={"do_remote_decode": True}
    )
    assert pair.prefill.metric("vllm:kv_cache_usage_perc") > 0
    assert eventually(lambda: pair.prefill.idle)


def test_clients_that_go_away(pair: Found) -> None:
    """Nothing stays behind on either side, and nobody else gets a wrong token."""
    chance = random.Random(10)
    prompts = [prompt(chance.randrange(1, 2000), seed=11 + i) for i in range(40)]
    patience = [chance.choice([0.02, 0.1, 0.3, None]) for _ in prompts]

    def ask(ids: list[int], seconds: float | None) -> list[int] | None:
        if seconds is None:
            return pair.both(ids)
        try:
            complete(pair.proxy.url, ids, 200, timeout=seconds)
        except httpx.TimeoutException:
            return None
        return None

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts, patience))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer is None or answer == pair.local(ids)
    assert eventually(lambda: pair.idle)


LOST_OF = 8
AFFECTED = re.compile(r"request\(s\) rescheduled \((\d+) tokens affected\)")


def affected(one: Engine) -> int:
    """Tokens that an engine has computed in the place of what did not arrive."""
    found = AFFECTED.findall(one.log.read_text(errors="replace"))
    return sum(map(int, found))


def computed(one: Engine) -> float:
    """Tokens that an engine has computed; vLLM's counter is without those above."""
    source = 'source="local_compute"'
    prompts = metric_of(one.metrics(), "vllm:prompt_tokens_by_source_total", source)
    return prompts + affected(one)


async def decoded(
    ids: list[int],
    lost: Collection[int],
    prefill: Engine,
    decode: Engine,
    leave_after_s: float = 0.0,
) -> list[int]:
    """What decode makes of a prompt of which somebody between offers some blocks.

    The client may leave before, and then it is nothing.
    """
    name, blocks = secrets.token_hex(8), len(ids) // BLOCK_TOKENS
    landed = [block for block in range(blocks) if block not in lost]
    sends = {"do_remote_decode": True, "transfer_id": name}
    async with kvwire.open(require=["tcp"]) as comm:
        relay = Relay(comm, await comm.listen("127.0.0.1:0"), blocks=blocks)
        # Together, or a lease may end in between on a busy machine.
        computing = partial(prefill.generate, ids, 1, kv_transfer_params=sends)
        await gather_all(asyncio.to_thread(computing), relay.take(prefill, name))
        loads, out = relay.offer(landed)
        more: dict[str, Any] = {"timeout": leave_after_s} if leave_after_s else {}
        try:
            answer = await asyncio.to_thread(
                partial(decode.generate, ids, kv_transfer_params=loads, **more)
            )
        except httpx.TimeoutException:
            await out
            return []
        assert len((await out).landed) == len(landed)
    return tokens_of(answer)


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ([], 0),
        ([7], 1),
        ([6, 7], 2),
        ([4, 5, 6, 7], 4),
        ([*range(8)], 8),
        # One hole: vLLM computes what lies behind it as well.
        ([0], 8),
        ([3], 5),
        ([3, 7], 5),
        ([1, 2, 5, 6], 7),
    ],
    ids=str,
)
def test_only_what_lies_behind_the_first_hole_is_computed(
    pair: Found, lost: list[int], again: int
) -> None:
    """By an engine that does not know its own URL. vLLM itself counts."""
    seed = 100 + sum(2**block for block in lost)
    ids = prompt(LOST_OF * BLOCK_TOKENS, seed)
    want = tokens_of(pair.decode.generate(ids, cache_salt="local"))
    before = affected(pair.prefill)
    assert asyncio.run(decoded(ids, lost, pair.decode, pair.prefill)) == want
    assert affected(pair.prefill) - before == again * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("blocks", "lost", "again"),
    [
        (8, [0], 1),
        (8, [3], 1),
        (8, [3, 7], 2),
        # A single block behind a hole is no reason for a request more.
        (8, [1, 2, 5, 6], 5),
        (63, [20], 1),
        (63, [20, 40], 2),
        (63, [10, 11, 12, 25, 40, 41, 55], 7),
    ],
    ids=str,
)
def test_only_holes_are_computed(
    pair: Found, blocks: int, lost: list[int], again: int
) -> None:
    """By an engine that can ask itself; 63 blocks have 8,064 tokens."""
    ids = prompt(blocks * BLOCK_TOKENS, 400 + sum(lost))
    want = pair.local(ids)
    before = computed(pair.decode)
    assert asyncio.run(decoded(ids, lost, pair.prefill, pair.decode)) == want
    assert computed(pair.decode) - before == again * BLOCK_TOKENS
    assert eventually(lambda: pair.idle)


def test_clients_that_leave_while_a_hole_is_computed(pair: Found) -> None:
    """It is 26 blocks, which take several steps; the engine goes on with others."""
    lost = range(5, 31)
    left = []
    for number, leave_after_s in enumerate((0.1, 0.2, 0.3, 0.5, 0.8)):
        ids = prompt(40 * BLOCK_TOKENS, 500 + number)
        both = pair.prefill, pair.decode
        left.append(asyncio.run(decoded(ids, lost, *both, leave_after_s)) == [])
        assert eventually(lambda: pair.idle)
    assert any(left)
    ids = prompt(40 * BLOCK_TOKENS, 510)
    want = pair.local(ids)
    assert asyncio.run(decoded(ids, lost, pair.prefill, pair.decode)) == want
    assert eventually(lambda: pair.idle)


def test_a_prefill_engine_that_is_killed(pair: Found, tmp_path: Path) -> None:
    """What decode waits for does not come; it computes, and the next one works."""
    ids = prompt(2000, seed=60)
    params = {
        "do_remote_prefill": True,
        "transfer_id": "never-published",
        "remote": [pair.prefill.kv],
    }
    want = pair.local(ids)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(pair.decode.generate, ids, kv_transfer_params=params)
        assert eventually(lambda: pair.decode.metric("vllm:num_requests_waiting") == 1)
        pair.prefill.kill()
        through = pool.submit(pair.both, prompt(800, seed=61))
        assert tokens_of(waiting.result()) == want
        alone = through.result()
    pair.prefill.start()
    pair.prefill.wait()
    assert alone == pair.local(prompt(800, seed=61))
    again = prompt(1200, seed=62)
    assert pair.both(again) == pair.local(again)
    assert eventually(lambda: pair.idle)
