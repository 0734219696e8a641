"""Kubernetes as a directory: the endpoints of a Service, from its API server.

Kubernetes reports the endpoints that exist and are ready; their role and other fields
are in the URL. A record has the labels ``node``, its pod's name, and ``host``, the name
of the machine that runs the pod. A dual-stack Service has slices for each family; a pod
with addresses of both is one member.

The Service's slices are listed and then watched, so that a change arrives at once.
Every ``interval_s`` the watch ends and the slices are listed again, which renews the
members and corrects anything that the watch has missed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from kvwire.aio import Upkeep
from kvwire.config import local_path
from kvwire.directory.base import DIRECTORY_RETRY_S, Batch
from kvwire.directory.dns import DnsDirectory, is_six, prefers_six
from kvwire.directory.tls import client_context
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.limits import MIB

# How often the endpoints are listed again; changes arrive at once.
KUBERNETES_INTERVAL_S: Final = 30.0
# The largest answer of the API server: 1,000 endpoints have half a megabyte.
KUBERNETES_ANSWER_BYTES_MAX: Final = 16 * MIB

with needed_by("a directory in Kubernetes", extra="kubernetes"):
    import httpx

_CONNECT_S: Final = 5.0
# The API server itself ends a watch. After this much more silence, the server is gone.
_SILENCE_S: Final = 5.0
_GONE: Final = 410


class _Target(msgspec.Struct, frozen=True):
    name: str = ""


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    target_ref: _Target = _Target()
    node_name: str | None = None


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    endpoints: list[_Endpoint] | None = None


class _Member(NamedTuple):
    """An address of a pod, and its record; no record where it is not an address."""

    pod: str
    host: str
    record: bytes


_Slices = dict[str, dict[str, _Member]]


class _List(msgspec.Struct, frozen=True):
    metadata: _Metadata
    items: list[_Slice] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: _Slice


_LIST: Final = msgspec.json.Decoder(_List)
_EVENT: Final = msgspec.json.Decoder(_Event)


class KubernetesDirectory(DnsDirectory):
    """Finds members by a Service: ``k8s://decode.default:7400?role=decode``.

    The pod's service account needs permission to list and watch ``endpointslices``.

    Raises:
        UsageError: The URL is not ``k8s://service.namespace:port``, a value is not
            allowed, or no API server is known because this is not a pod and ``api`` is
            not given.
    """

    options: ClassVar[Mapping[str, str]] = {
        **DnsDirectory.options,
        "interval_s": str(KUBERNETES_INTERVAL_S),
        "api": "",
        "account": "/var/run/secrets/kubernetes.io/serviceaccount",
    }
    read_only = "Kubernetes"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        service, _, namespace = self._host.partition(".")
        if not namespace:
            raise UsageError(f'directory {self}: write "k8s://service.namespace:port"')
        self._api = self.given["api"] or _api_of_pod()
        if not self._api.startswith(("https://", "http://")):
            raise UsageError(f'directory {self}: outside a pod give "api=https://..."')
        try:
            httpx.URL(self._api)
        except httpx.InvalidURL as exc:
            raise UsageError(f"directory {self}: api={self._api!r}: {exc}") from None
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}

    async def follow(self) -> AsyncGenerator[Batch, None]:
        known: dict[str, bytes] = {}
        with self.failing(httpx.HTTPError, msgspec.MsgspecError, UsageError):
            async with self._client() as client:
                # A server whose watches keep ending at once is overloaded, so pauses
                # grow.
                steady_s = self._interval_s / 2
                upkeep = Upkeep(DIRECTORY_RETRY_S, self._interval_s, steady_s=steady_s)
                async for _ in upkeep:
                    version, slices = await self._list(client)
                    upkeep.back()
                    known, batch = _changed(known, slices, renew=True)
                    yield batch
                    async with aclosing(self._watch(client, version)) as events:
                        async for event in events:
                            name = event.object.metadata.name
                            slices.pop(name, None)
                            if event.type != "DELETED":
                                slices[name] = self._members(event.object)
                            known, batch = _changed(known, slices, renew=False)
                            yield batch
                    upkeep.lost("the watch has ended")

    async def _list(self, client: httpx.AsyncClient) -> tuple[str, _Slices]:
        """Return the list's version, and the members of each slice."""
        body = bytearray()
        async with client.stream("GET", self._path, params=self._query) as answer:
            await _accepted(answer)
            async with _parts(answer) as parts:
                async for part in parts:
                    body += part
                    _check_size(len(body))
        found = _LIST.decode(body)
        slices = {s.metadata.name: self._members(s) for s in found.items or ()}
        return found.metadata.resource_version, slices

    async def _watch(
        self, client: httpx.AsyncClient, version: str
    ) -> AsyncGenerator[_Event, None]:
        """Yield changes since a version, until the API server ends the watch."""
        query = self._query | {
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(self._interval_s))),
        }
        rest = bytearray()
        async with client.stream("GET", self._path, params=query) as answer:
            if answer.status_code == _GONE:
                return
            await _accepted(answer)
            async with _parts(answer) as parts:
                async for part in parts:
                    *lines, last = (rest + part).split(b"\n")
                    rest = bytearray(last)
                    _check_size(len(rest))
                    for line in filter(None, lines):
                        event = _EVENT.decode(line)
                        if event.type == "ERROR":
                            return  # the version is too old: everything is read again
                        if event.type != "BOOKMARK":
                            yield event

    def _members(self, found: _Slice) -> dict[str, _Member]:
        """Return a slice's ready endpoints by their keys."""
        members: dict[str, _Member] = {}
        for endpoint in found.endpoints or ():
            host = next(iter(endpoint.addresses), "")
            if not host or endpoint.conditions.ready is False:
                continue
            pod = endpoint.target_ref.name
            labels = {"node": pod, "host": endpoint.node_name or ""}
            labels = {name: value for name, value in labels.items() if value}
            try:
                record = self._record(host, pod, labels)
            except UsageError:
                # Not a record: it is counted and skipped.
                members[host] = _Member(pod or host, host, b"")
            else:
                members[record.key] = _Member(pod or host, host, record.encode())
        return members

    def _client(self) -> httpx.AsyncClient:
        """Make a client with the service account's current token and CA."""
        account = Path(local_path(self.given["account"]))
        token = account / "token"
        ca = account / "ca.crt"
        return httpx.AsyncClient(
            base_url=self._api,
            headers=(
                {"Authorization": f"Bearer {token.read_text().strip()}"}
                if token.exists()
                else {}
            ),
            verify=client_context(str(ca) if ca.exists() else ""),
            timeout=httpx.Timeout(_CONNECT_S, read=self._interval_s + _SILENCE_S),
            trust_env=False,
        )


def _api_of_pod() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


async def _accepted(answer: httpx.Response) -> None:
    if answer.status_code != httpx.codes.OK:
        raise OSError(f"the API server answered with status {answer.status_code}")


def _parts(answer: Any) -> aclosing[Any]:
    """Iterate a response's parts; close the generator too, which httpx does not."""
    return aclosing(answer.aiter_bytes())


def _check_size(nbytes: int) -> None:
    if nbytes > KUBERNETES_ANSWER_BYTES_MAX:
        raise OSError(
            f"the API server's answer has more than {KUBERNETES_ANSWER_BYTES_MAX} bytes"
        )


def _changed(
    known: dict[str, bytes], slices: _Slices, *, renew: bool
) -> tuple[dict[str, bytes], dict[str, bytes | None]]:
    """Return the current members, and the batch of changes.

    While an endpoint moves from one slice to another, it is in both or in neither for a
    moment; only the union of all slices counts.
    """
    found = {key: member for part in slices.values() for key, member in part.items()}
    hosts: dict[str, list[str]] = {}
    for member in found.values():
        hosts.setdefault(member.pod, []).append(member.host)
    six = {pod: prefers_six(addresses) for pod, addresses in hosts.items()}
    now = {k: m.record for k, m in found.items() if is_six(m.host) is six[m.pod]}
    batch: dict[str, bytes | None] = dict.fromkeys(known.keys() - now.keys())
    batch |= {k: v for k, v in now.items() if renew or known.get(k) != v}
    return now, batch
