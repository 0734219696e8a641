"""The connector's settings in ``kv_connector_extra_config``, beside kvwire's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvwire.config import FIELDS, Config, Seconds, checked_values
from kvwire.directory.dialable import check_dialable, read_advertised
from kvwire.errors import UsageError, nearest
from kvwire.limits import MIB
from kvwire.types import Address
from kvwire_vllm.announce import http_url

EXTRA_CONFIG: Final = "kv_connector_extra_config"
S = TypeVar("S", bound=msgspec.Struct)

LAYER: Final = "layer"
CHUNK: Final = "chunk"

# A mark costs the sending thread about 1 ms beside its bytes: as much as sending 4 MiB
# (docs/topics/vllm.md).
GROUP_BYTES: Final = 4 * MIB

_PORT_MAX: Final = 65_535
_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for an engine's KV transfers.

    Attributes:
        listen: The address of its first rank; rank r listens r ports higher. Port 0
            uses any free port, for requests whose prefill answers before decode begins.
        advertise: The host that peers dial, if it differs from ``listen``, such as
            ``"10.0.0.7"``. With a port, as in ``"10.0.0.7:17400"``, it is the first
            rank's address, and rank r has the port r higher.
        stream: When prefill sends: each ``"layer"`` once it is written, or each
            ``"chunk"`` of a prompt after its forward pass (for engines that run full
            CUDA graphs, where no layer hook is called).
        group_bytes: With ``"layer"``, layers of a forward pass that are smaller than
            this are sent together, up to four times this size; the last one is sent
            alone.
        peers: The addresses of other engines' ranks that requests may name. By default,
            requests may name addresses signed with the key of ``psk_file`` and, with
            trust ``"loopback"``, any address on this host.
        fingerprint: Names the weights, including the draft model's; "" for a name
            derived from the files' content.
        codec: A lossy encoding for KV between engines: ``"fp8"``, ``"int8"`` or
            ``"int4"``; "" for none. It must be the same on both engines.
        load_timeout_s: How long to wait for KV. After it, vLLM's
            ``kv_load_failure_policy`` decides whether missing KV is computed here or
            the request fails. Make it longer than any prompt has to wait at prefill.
        fence_s: How long a preemption waits for links to release its blocks before the
            links are dropped; transfers of other requests then resume.
        http: The URL at which others and this engine itself reach its HTTP server. If
            set, the engine announces itself in the ``directory`` of kvwire's
            configuration, if there is one. If a prompt arrives with holes, it computes
            only the holes, by requests to itself.
        role: The role to announce: ``"prefill"``, ``"decode"`` or ``"both"``; "" to
            derive it from vLLM's ``kv_role``.
        untested_vllm: Start even if kvwire was not tested with this release of vLLM.
    """

    listen: str = "127.0.0.1:0"
    advertise: str = ""
    stream: Literal["layer", "chunk"] = LAYER
    group_bytes: _Count = GROUP_BYTES
    peers: tuple[str, ...] = ()
    fingerprint: str = ""
    codec: Literal["", "fp8", "int8", "int4"] = ""
    load_timeout_s: Seconds = 300.0
    fence_s: Seconds = 1.0
    http: str = ""
    role: Literal["", "prefill", "decode", "both"] = ""
    untested_vllm: bool = False

    def __post_init__(self) -> None:
        listen = Address.parse(self.listen)
        if not listen.port and self.advertise and self._advertised.port:
            raise UsageError(
                f"advertise={self.advertise!r} has a port, but listen={self.listen!r} "
                "takes any free port: set the same port in both"
            )
        try:
            # The real port is not known yet; the check accepts any number but 0.
            self.advertised(dataclasses.replace(listen, port=listen.port or 1))
        except UsageError as exc:
            raise UsageError(
                f"listen={self.listen!r}, advertise={self.advertise!r}: {exc}; set "
                '"advertise" to the host name that other engines dial'
            ) from None
        for address in self.peers:
            check_dialable(Address.parse(address))
        if self.http:
            http_url(self.http)

    def beside(self, ranks: int) -> VllmSettings:
        """Return an engine's settings with ports above the ports of `ranks` ranks."""
        advertise = self.advertise
        if advertise and self._advertised.port:
            advertise = str(_higher(self._advertised, ranks))
        return msgspec.structs.replace(
            self, listen=str(self.address(ranks)), advertise=advertise
        )

    def address(self, rank: int) -> Address:
        """Return the address on which a rank listens."""
        first = Address.parse(self.listen)
        return _higher(first, rank) if first.port else first

    def advertised(self, bound: Address, rank: int = 0) -> str:
        """Return the address that peers dial to reach a rank that listens on `bound`.

        Raises:
            UsageError: No peer can dial it.
        """
        if self.advertise:
            where = self._advertised
            port = _higher(where, rank).port if where.port else bound.port
            bound = dataclasses.replace(bound, host=where.host, port=port)
        check_dialable(bound)
        return str(bound)

    @property
    def _advertised(self) -> Address:
        return read_advertised(self.advertise)


def _higher(first: Address, ranks: int) -> Address:
    """Return the address that is `ranks` ports higher."""
    port = first.port + ranks
    if port > _PORT_MAX:
        raise UsageError(
            f"{first}: rank {ranks} would get port {port}; choose a lower first port"
        )
    return dataclasses.replace(first, port=port)


def read_settings(
    extra: Mapping[str, Any], profile: Mapping[str, str]
) -> tuple[VllmSettings, Config]:
    """Read ``kv_connector_extra_config``."""
    settings = read_keys(extra, VllmSettings, others=FIELDS)
    wire = {key: value for key, value in extra.items() if key in FIELDS}
    given = wire.pop("profile", {})
    if not isinstance(given, Mapping):
        raise UsageError(f"{EXTRA_CONFIG}: profile={given!r}: pass a table of strings")
    profile = {**profile, **given}
    if settings.codec:
        profile = {"vllm_kv_codec": settings.codec, **profile}
    return settings, Config.load(profile=profile, **wire)


def read_keys(extra: Mapping[str, Any], kind: type[S], others: Iterable[str] = ()) -> S:
    """Read settings from ``kv_connector_extra_config``, except the keys in `others`."""
    known = {*kind.__struct_fields__, *others}
    for name in extra.keys() - known:
        hint = nearest(name, known)
        raise UsageError(f"{EXTRA_CONFIG}: unknown key {name!r}; {hint}")
    return checked_values(extra, kind, {}, EXTRA_CONFIG)
