"""What the halves of a lane tell each other: read as it was said, or refused.

Bootstraps come from the handshake and descriptors from the control link. Whoever says
something else, or less, or more, meets the documented error and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.backend import Backend, pacing
from kvwire.errors import BackendUnavailable, ProtocolError
from kvwire.limits import BOOTSTRAP_BYTES_MAX, KIB
from kvwire.types import Role
from kvwire_certify.conformance.rig import LaneRig
from kvwire_local.rendezvous import Host
from kvwire_nccl.lane import NcclBootstrap
from kvwire_nixl import NixlBackend, driver
from kvwire_nixl.wire import LaneProofs, NixlBootstrap, NixlPlace
from kvwire_ucx import UcxBackend, worker
from kvwire_ucx.bootstrap import MESSAGES, UcxBootstrap
from kvwire_ucx.bootstrap import parse as parse_ucx
from kvwire_ucx.pieces import (
    PIECES_MAX,
    descriptor,
    read_descriptor,
)
from kvwire_ucx.windows import describe_keys, read_keys
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.kvwire_ucx.support import TCP, needs_ucx
from tests.backends.kvwire_ucx.test_bootstrap import ucx_bootstraps
from tests.support.waiting import PATIENCE_S


class Bootstraps(NamedTuple):
    """How a backend says where a half of a lane is."""

    values: st.SearchStrategy[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


names = st.binary(max_size=256)
words = st.text(st.characters(codec="ascii"), max_size=20)
BOOTSTRAPS = {
    "local": Bootstraps(
        st.builds(Host, st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1)),
        Host.encode,
        Host.decode,
    ),
    "nccl": Bootstraps(
        st.builds(NcclBootstrap, st.text(max_size=16), names, names),
        NcclBootstrap.encode,
        NcclBootstrap.decode,
    ),
    "nixl": Bootstraps(
        st.builds(NixlBootstrap, words, words, words, st.integers(0, 2**64 - 1), names),
        NixlBootstrap.encode,
        NixlBootstrap.decode,
    ),
    "ucx": Bootstraps(ucx_bootstraps, UcxBootstrap.to_bytes, parse_ucx),
}
each_bootstrap = pytest.mark.parametrize("form", BOOTSTRAPS.values(), ids=BOOTSTRAPS)


@each_bootstrap
@given(data=st.data())
def test_a_bootstrap_is_read_whole_or_refused(
    form: Bootstraps, data: st.DataObject
) -> None:
    said = data.draw(form.values)
    raw = form.encode(said)
    assert len(raw) <= BOOTSTRAP_BYTES_MAX
    assert form.decode(raw) == said
    cut = data.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:cut], raw + b"\0"):
        with pytest.raises(BackendUnavailable, match="peer"):
            form.decode(wrong)


@each_bootstrap
@given(data=st.data())
def test_a_bootstrap_of_a_later_version_is_refused_by_name(
    form: Bootstraps, data: st.DataObject
) -> None:
    """The last byte of what it begins with is the version."""
    raw = form.encode(data.draw(form.values))
    place = 4 if raw.startswith(b"KVUX") else 7
    assert raw[place] in b"1\1"
    later = raw[:place] + bytes((raw[place] + 1,)) + raw[place + 1 :]
    with pytest.raises(BackendUnavailable, match="both sides need the same") as caught:
        form.decode(later)
    said = str(caught.value)
    for begins in (raw[: place + 1], later[: place + 1]):
        assert repr(begins) in said or begins.hex() in said


@each_bootstrap
@given(raw=st.binary(max_size=400))
def test_what_a_stranger_says_is_no_bootstrap(form: Bootstraps, raw: bytes) -> None:
    with pytest.raises(BackendUnavailable, match="peer"):
        form.decode(raw)


# --- descriptors ----------------------------------------------------------------------

numbers = st.integers(0, MESSAGES - 1)
# One length alone is said by none at all.
lengths: st.SearchStrategy[list[int]] = st.just([]) | st.lists(
    st.integers(1, 2**19), min_size=2, max_size=PIECES_MAX
)


@given(first=numbers, said=lengths)
def test_messages_of_ucx(first: int, said: list[int]) -> None:
    assert read_descriptor(descriptor(first, said), sum(said)) == (first, said)


@given(said=st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=40))
def test_keys_of_a_window_of_ucx(said: list[bytes]) -> None:
    assert read_keys(describe_keys(said), len(said)) == said


@given(
    said=st.lists(st.integers(1, 1 << 20), max_size=20),
    news=st.lists(st.binary(max_size=300), max_size=3),
)
def test_places_of_nixl(said: list[int], news: list[bytes]) -> None:
    ours, theirs = (LaneProofs(b"s" * 32, role) for role in (Role.CLIENT, Role.SERVER))
    sizes = np.array(said, np.uint64)
    addresses = np.arange(sizes.size, dtype=np.uint64) * np.uint64(1 << 40)
    place = NixlPlace(addresses, sizes, 7, tuple(news))
    heard = theirs.read_place(ours.place(place), sum(said))
    assert heard.addresses.tolist() == addresses.tolist()
    assert heard.lengths.tolist() == said
    assert (heard.word, heard.news) == (7, tuple(news))


@given(raw=st.binary(max_size=200), count=st.integers(1, 8))
def test_any_bytes_are_keys_of_ucx_or_refused(raw: bytes, count: int) -> None:
    """Those of other backends are fuzzed: tests/programs/fuzz/targets/backends.py."""
    with suppress(ProtocolError):
        assert describe_keys(read_keys(raw, count)) == raw


# --- lanes whose library makes TCP sockets by itself take the pacing from them --------


@pytest.mark.parametrize(
    ("backend", "settings", "module"),
    [
        pytest.param(UcxBackend, {"TLS": TCP}, worker, marks=needs_ucx, id="ucx"),
        pytest.param(
            NixlBackend,
            {"param.engine_config": f"TLS={TCP}"},
            driver,
            marks=needs_nixl,
            id="nixl",
        ),
    ],
)
async def test_both_sides_of_a_lane_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
    backend: type[Backend],
    settings: dict[str, str],
    module: ModuleType,
) -> None:
    found: list[int] = []

    def unpace(epolls: Any) -> None:
        found.append(pacing.unpace(epolls))

    monkeypatch.setattr(module, "unpace", unpace)
    test = LaneRig(backend, settings, PATIENCE_S)
    left, right = await test.pair()
    left.send(64 * KIB)
    await test.moved(left, right, 1)
    left.abort()
    right.abort()
    await test.aclose()
    assert len(found) == 2
    assert min(found) >= 1
