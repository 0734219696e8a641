"""Prefixes that are copied to a second engine before it is asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvwire import UsageError
from kvwire.integrations.vllm.proxy import ahead
from kvwire.integrations.vllm.proxy.ahead import (
    AheadPolicy,
    HotPrefixes,
    make_ahead,
    shared_prompt,
)
from tests.support.engines.proxies import (
    Engines,
    Said,
    app,
    call,
    fine,
    post,
    says,
    turns_until,
)

SYSTEM = "You are a helpful agent with many tools. " * 40


def ask(number: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": f"{SYSTEM}{number} is the question",
        "stream": False,
    }


def asked(engines: Engines) -> list[tuple[str, dict[str, Any]]]:
    """Who was asked for an answer, and what; not who was probed."""
    return [(host, body) for host, body in engines.asked if "model" in body]


class EveryTime(AheadPolicy):
    """Copies each prompt."""

    def answered(
        self, body: Mapping[str, Any], engine: str, now_s: float
    ) -> Mapping[str, Any] | None:
        return body


class Fails(AheadPolicy):
    """Raises."""

    def answered(
        self, body: Mapping[str, Any], engine: str, now_s: float
    ) -> Mapping[str, Any] | None:
        raise ValueError("no policy")


def test_a_prefix_is_copied_once_while_it_is_hot() -> None:
    policy = HotPrefixes()
    wanted = [policy.answered(ask(one), "http://d1", one) for one in range(1, 8)]
    (copied,) = [one for one in wanted if one is not None]
    assert copied["prompt"] == SYSTEM
    assert copied["model"] == "m"
    # After an hour it is cold, and may get hot again.
    wanted = [policy.answered(ask(one), "http://d1", 3600 + one) for one in range(8)]
    assert len([one for one in wanted if one is not None]) == 1


def test_rare_prefixes_and_short_ones_are_not_copied() -> None:
    policy = HotPrefixes()
    for number in range(8):
        assert policy.answered(ask(number), "http://d1", 600.0 * number) is None
        assert policy.answered({"prompt": "short"}, "http://d1", number) is None
        assert policy.answered({"prompt": None}, "http://d1", number) is None


def test_prefixes_that_are_counted_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "PROXY_PREFIXES_MAX", 4)
    policy = HotPrefixes()
    for _ in range(8):
        for number in range(5):  # each pushes out the one that comes next
            body = {"prompt": f"{number} {SYSTEM}"}
            assert policy.answered(body, "http://d1", 0.0) is None


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({"prompt": "a" * 300 + "b"}, {"prompt": "a" * 300}, {"prompt": "a" * 300}),
        ({"prompt": [1] * 300}, {"prompt": [*[1] * 290, 2]}, {"prompt": [1] * 290}),
        ({"prompt": "a" * 300}, {"prompt": [1] * 300}, None),
        ({"prompt": "a" * 99}, {"prompt": "a" * 300}, None),
        (
            {"messages": [{"content": "a" * 300}, {"content": "b"}]},
            {"messages": [{"content": "a" * 300}, {"content": "c"}]},
            {"messages": [{"content": "a" * 300}]},
        ),
        ({}, {}, None),
    ],
)
def test_what_two_prompts_share(
    one: dict[str, Any], other: dict[str, Any], shared: dict[str, Any] | None
) -> None:
    assert shared_prompt(one, other) == shared


async def test_another_engine_is_asked_for_one_token_of_the_prefix() -> None:
    engines = Engines()
    proxy = app(engines, prefill=(), copy_ahead=HotPrefixes())
    async with proxy.running():
        for number in range(4):
            assert (await post(proxy, ask(number))).status_code == 200
        await turns_until(lambda: len(asked(engines)) == 5)
    host, copied = asked(engines)[-1]
    assert host != asked(engines)[-2][0]
    assert (copied["prompt"], copied["max_tokens"]) == (SYSTEM, 1)
    assert "stream" not in copied


async def test_only_full_blocks_are_copied_and_one_token_computed() -> None:
    async def says_its_size(body: dict[str, Any]) -> Said:
        line = b'vllm:cache_config_info{block_size="4"} 1.0\n'
        return await (fine if body else says(line, headers={}))(body)

    engines = Engines(d1=says_its_size, d2=says_its_size)
    proxy = app(engines, prefill=(), copy_ahead=HotPrefixes())
    prompts = [[7] * 9, [7] * 12, [7] * 3, [[7] * 12]]
    for number, prompt in enumerate(prompts):
        body = {"model": "m", "prompt": prompt}
        said = await call(proxy, "POST", "/copy-ahead", json=body)
        assert said.json() == {"begun": True}
        await turns_until(lambda: len(asked(engines)) == number + 1)  # noqa: B023
    copied = [body["prompt"] for _, body in asked(engines)]
    assert copied == [[7] * 9, [7] * 9, [7], [[7] * 12]]


async def test_it_gets_the_kv_of_a_prefill_engine_if_there_is_one() -> None:
    engines = Engines()
    proxy = app(engines, copy_ahead=EveryTime())
    async with proxy.running():
        assert (await post(proxy, ask(1))).status_code == 200
        await turns_until(lambda: len(asked(engines)) == 4)
    there = {host: body["kv_transfer_params"] for host, body in asked(engines)}
    assert sorted(there) == ["d1", "d2", "p1", "p2"]
    assert there["d2"]["do_remote_prefill"]


async def test_a_policy_or_a_copy_that_fails_costs_no_request_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = Engines()
    for policy in (Fails(), EveryTime()):
        proxy = app(engines, prefill=(), copy_ahead=policy)
        async with proxy.running():
            assert (await post(proxy, ask(1))).status_code == 200
    assert "ValueError: no policy" in caplog.text


async def test_a_prompt_is_brought_back_when_somebody_says_that_it_comes() -> None:
    engines = Engines()
    proxy = app(engines, prefill=(), copy_ahead=HotPrefixes())
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with proxy.running():
        said = await call(proxy, "POST", "/copy-ahead", json=body)
        assert (said.status_code, said.json()) == (202, {"begun": True})
        await turns_until(lambda: bool(asked(engines)))
    ((_, copied),) = asked(engines)
    assert (copied["messages"], copied["max_tokens"]) == (body["messages"], 1)
    said = await call(app(engines), "POST", "/copy-ahead", json=body)
    assert said.status_code == 409
    assert "without --copy-ahead" in said.json()["error"]["message"]


def test_policies_are_found_by_entry_points() -> None:
    assert isinstance(make_ahead("hot-prefixes"), HotPrefixes)
    with pytest.raises(UsageError, match=r"copy-ahead 'hot-prefix'.*hot-prefixes"):
        make_ahead("hot-prefix")
