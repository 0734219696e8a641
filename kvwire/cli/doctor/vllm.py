"""``kvwire doctor --vllm``: whether vLLM's engines share prompts.

A proxy reports its findings about each engine. For a single engine, its metrics are
read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec

from kvwire.backend import Finding
from kvwire.errors import KVWireError, UsageError
from kvwire.integrations.vllm.announce import http_url
from kvwire.integrations.vllm.proxy.checking import read_engine
from kvwire.integrations.vllm.proxy.client import EngineClient, EngineFailed
from kvwire.integrations.vllm.proxy.engines import VllmEngine, VllmServer
from kvwire.integrations.vllm.proxy.limits import PROXY_METRICS_BYTES_MAX
from kvwire.integrations.vllm.proxy.sharing import (
    KV_ROLES,
    MOVED,
    EngineReading,
    SharedPrompts,
    judge,
)

_ANSWERS_WITHIN_S: Final = 10.0


class _Found(msgspec.Struct):
    """An engine in the ``/fleet`` of a proxy."""

    url: str
    role: str
    state: str
    answered: int = 0
    findings: tuple[Finding, ...] = ()


class _Fleet(msgspec.Struct):
    engines: tuple[_Found, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The findings about one engine; its role comes from a proxy or an operator."""

    url: str
    role: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmReport:
    """The findings about an engine, or about all engines of a proxy."""

    url: str
    engines: tuple[EngineReport, ...]

    @property
    def well(self) -> bool:
        """Whether prompts are computed once, as far as is known."""
        every = [finding for one in self.engines for finding in one.findings]
        return all(finding.state != "missing" for finding in every)


async def examine_vllm(url: str) -> VllmReport:
    """Find out, from a proxy or an engine, whether engines share prompts.

    Cancel safety: safe, it only reads.

    Raises:
        UsageError: The URL is not ``http://host:port``, or neither a proxy nor an
            engine answers there.
        KVWireError: Nothing answers.
    """
    url = http_url(url)
    client = EngineClient()
    asked = VllmEngine(server=VllmServer(url, ()), role="")
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            found = await _fleet(client, asked)
            engines = found or (_report(url, await read_engine(client, asked)),)
    except (EngineFailed, TimeoutError) as exc:
        why = exc.why if isinstance(exc, EngineFailed) else "it does not answer"
        raise KVWireError(f"--vllm {url}: {why}") from None
    finally:
        await client.close()
    return VllmReport(url=url, engines=engines)


async def _fleet(client: EngineClient, proxy: VllmEngine) -> tuple[EngineReport, ...]:
    """Return a proxy's engines; () if the URL belongs to an engine."""
    async with client.ask(proxy, "/fleet") as response:
        content = await response.body(PROXY_METRICS_BYTES_MAX)
    if response.status != HTTPStatus.OK:
        return ()
    try:
        fleet = msgspec.json.decode(content, type=_Fleet)
    except msgspec.MsgspecError as exc:
        raise UsageError(f"--vllm {proxy.url}: its /fleet: {exc}") from None
    return tuple(
        EngineReport(url=one.url, role=one.role, findings=tuple(_of_fleet(one)))
        for one in fleet.engines
    )


def _of_fleet(engine: _Found) -> Iterator[Finding]:
    if engine.state != "up":
        yield Finding(name="state", state="warn", text=engine.state)
    yield from engine.findings
    if not engine.findings:
        text = f"no problem found after {engine.answered} answers"
        yield Finding(name="prompts", state="ok", text=text)


def _report(url: str, reading: EngineReading) -> EngineReport:
    """Return the findings from an engine's own metrics."""
    role = {text: role for role, text in KV_ROLES.items()}.get(reading.kv_role, "both")
    shared = SharedPrompts()
    shared.take(reading)
    findings = list(judge(shared, role, in_sequence=False))
    if reading.version:
        text = (
            f"KvwireConnector of kvwire {reading.version}, {reading.kv_role}; prompts "
            f"sent: {reading.sent}, fetched: {reading.results[MOVED]}"
        )
        findings.insert(0, Finding(name="connector", state="ok", text=text))
    return EngineReport(url=url, role=role, findings=tuple(findings))
