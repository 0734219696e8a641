"""The four verbs, called wrongly: the error names the field, and nothing was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwire
from kvwire import KVSpec, PagedCache, UsageError
from kvwire.kv.geometry import Geometry, Tokens, describe
from kvwire.transfers.dedup import digest, held, listed_hashes
from tests.support import inside
from tests.support.caches import BLOCKS, LAYERS, SPEC, Memory, same
from tests.support.world import World, scenario

LIST = [3, 1, 4]
DEST = [10, 11, 12]
Verb = Callable[..., Any]


def verbs(w: World) -> dict[str, Verb]:
    return {
        "publish": w.p.publish,
        "push": w.push_side.push,
        "pull": w.pull_side.pull,
        "expect": w.d.expect,
    }


VERBS = pytest.mark.parametrize("verb", ["publish", "push", "pull", "expect"])


@contextmanager
def nothing_sent(w: World) -> Iterator[None]:
    """Neither side may say a word, or keep anything."""
    frames: list[object] = []
    for connection in (w.pull_side, w.push_side):
        link: Any = inside.link(connection)
        send = link.send

        def noted(*args: Any, send: Any = send) -> None:
            frames.append(args[0])
            send(*args)

        link.send = noted
    yield
    assert not frames
    for side in (w.p, w.d):
        assert not inside.registry(side).live
        assert not len(inside.buffers(side))


EACH = {"full": LIST, "window": LIST}
GROUPED = kvwire.PagedCache.grouped({name: (SPEC, Memory().tensors) for name in EACH})
# Beside those of tests/support/wrong_uses/uses.md.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"blocks": [3, BLOCKS]}, "block id 32 at position 1 is out of range"),
    ({"blocks": [3, 1, 3]}, "block id 3 appears twice, again at position 2"),
    ({"blocks": [[1], [2]]}, "not 2-dimensional"),
    ({"blocks": {"window": [1]}}, "unknown group 'window'"),
    ({"tokens": 3}, "tokens=3 is 1 blocks of 4 tokens"),
    ({"tokens": 13}, "tokens=13 is 4 blocks of 4 tokens"),
    ({"tokens": {"window": 12}}, "unknown group window"),
    ({"priority": -1}, "priority=-1: pass 0 to 255"),
    ({"priority": 1.5}, "priority=1.5: pass 0 to 255"),
    ({"lease_s": float("nan")}, "lease_s=nan"),
    ({"lease_s": float("inf")}, "lease_s=inf"),
    ({"deadline": -1.0}, "deadline=-1.0"),
    ({"deadline": float("nan")}, "deadline=nan"),
    ({"hashes": {"window": [b"a"]}}, "hashes: the groups are kv"),
    ({"id": "x" * 256}, "the transfer id has 256 bytes"),
    ({"id": None}, "transfer id None: pass a str, bytes or int"),
    ({"cache": Memory().tensors}, "PagedCache, not"),
    ({"cache": GROUPED}, "has the groups full, window"),
    ({"cache": GROUPED, "blocks": {"full": LIST}}, "group 'window' is missing"),
    ({"cache": GROUPED, "blocks": EACH, "hashes": [b"a"]}, "pass {group: hashes}"),
]
# Of an end that receives.
WRONG_HAVE: list[tuple[dict[str, Any], str]] = [
    ({"have": {b"a"}}, "it needs hashes="),
    ({"hashes": [b"a"] * 3, "have": 7}, "or a predicate"),
]


@VERBS
@scenario("inproc")
async def test_a_wrong_argument(w: World, verb: str) -> None:
    for wrong, said in WRONG + WRONG_HAVE * (verb in ("pull", "expect")):
        right: dict[str, Any] = {"id": "t", "cache": w.source.cache, "blocks": LIST}
        with nothing_sent(w), pytest.raises(kvwire.UsageError) as caught:
            verbs(w)[verb](**right | wrong)
        assert said in str(caught.value)


@scenario("inproc")
async def test_tensors_that_are_not_contiguous_are_moved_as_they_lie(w: World) -> None:
    """Strides are read and not assumed; what lies between is left alone."""
    wide = [np.full((BLOCKS, 2, 4, 2, 32), -1.0, np.float32) for _ in range(LAYERS)]
    cache = kvwire.PagedCache(SPEC, [tensor[..., :16] for tensor in wide])
    out = w.p.publish("t", w.source.cache, LIST)
    inc = w.pull_side.pull("t", cache, DEST)
    out.ready()
    out.finish()
    assert (await inc).complete
    for layer, tensor in enumerate(wide):
        sent = w.source.tensors[layer][LIST]
        assert (tensor[DEST][..., :16] == sent).all()
        assert (tensor[..., 16:] == -1.0).all()


@pytest.mark.parametrize("verb", ["publish", "expect"])
@scenario("inproc")
async def test_an_id_that_is_in_use(w: World, verb: str) -> None:
    call = verbs(w)[verb]
    first = call("t", w.source.cache, LIST)
    with pytest.raises(kvwire.UsageError, match="already and has not ended"):
        call("t", w.source.cache, LIST)
    # As text, bytes and number it is three names.
    others = [call(id, w.source.cache, LIST) for id in (b"t", 116)]
    for end in (first, *others):
        end.abort()
    call("t", w.source.cache, LIST).abort()


@VERBS
@pytest.mark.parametrize("form", ["number", "instant", "timedelta"])
@scenario("inproc")
async def test_deadlines_in_every_form(w: World, verb: str, form: str) -> None:
    began = inside.now()
    deadline: Any = {
        "number": 5.0,
        "instant": kvwire.Instant(began + 5.0),
        "timedelta": timedelta(seconds=5),
    }[form]
    end = verbs(w)[verb]("t", w.source.cache, LIST, deadline=deadline)
    outcome = await end
    assert inside.now() - began == pytest.approx(5.0, abs=0.1)
    assert "deadline" in outcome.missing["kv", LIST[0]]
    await end.drained()


@scenario("inproc")
async def test_a_deadline_in_the_middle_is_told_to_the_other_side(w: World) -> None:
    """What has landed by then is the outcome, and stays."""
    out, inc = w.begin(theirs={"deadline": 1.0})
    out.ready(blocks=slice(0, 2))
    outcome = await inc
    assert outcome.landed.ids().tolist() == DEST[:2]
    assert outcome.usable_prefix == 2
    assert "deadline" in outcome.missing["kv", DEST[2]]
    produced = await out
    assert produced.landed.ids().tolist() == LIST[:2]
    assert "deadline" in produced.missing["kv", LIST[2]]
    assert same(w.source, LIST[:2], w.target, DEST[:2])
    assert w.target.free(DEST[2:])


@VERBS
@scenario("inproc")
async def test_on_what_is_closed(w: World, verb: str) -> None:
    call = verbs(w)[verb]
    await w.p.close()
    await w.d.close()
    for _ in range(2):
        if verb in ("publish", "expect"):
            with pytest.raises(kvwire.ConnectionClosed):
                call("t", w.source.cache, LIST, deadline=0.1)
            continue
        end = call("t", w.source.cache, LIST, deadline=0.1)
        assert "clos" in str((await end).missing)
        await end.drained()
    for side in (w.p, w.d):
        assert not inside.registry(side).live


@VERBS
@scenario("inproc")
async def test_numbers_of_numpy_are_numbers(w: World, verb: str) -> None:
    """And what is computed of them is what plain ones find later."""
    other = {"publish": "pull", "pull": "publish", "push": "expect", "expect": "push"}
    tokens = len(LIST) * SPEC.block_tokens
    for kind in (np.int64, int):
        lists = {"publish": LIST, "push": LIST, "pull": DEST, "expect": DEST}
        caches = {"publish": w.source, "push": w.source}
        ends = [
            verbs(w)[name](
                kind(7),
                caches.get(name, w.target).cache,
                lists[name],
                tokens=kind(tokens),
                priority=kind(3),
            )
            for name in (verb, other[verb])
        ]
        out, inc = ends if verb in caches else reversed(ends)
        out.ready()
        out.finish()
        assert (await inc).complete
        assert (await out).usable_tokens == tokens
        assert w.p.snapshot().counters


@scenario("inproc")
async def test_consumers_and_group_bytes_of_numpy(w: World) -> None:
    count: Any = np.int64(1)
    out = w.p.publish("t", w.source.cache, LIST, consumers=count, group_bytes=count)
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    out.ready()
    out.finish()
    assert (await inc).complete


# --- hashes and what a consumer has: one hash a block, and a wrong call is told so ----


HASHED = KVSpec(layers=1, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")


def geometry(tokens: Tokens = None, **groups: int) -> Geometry:
    """Of so many blocks of each group."""
    counts = groups or {"kv": 3}
    cache = PagedCache.grouped(
        {name: (HASHED, [np.zeros((8, 2, 4, 1, 2), np.float32)]) for name in counts}
    )
    lists = cache.block_lists({name: range(count) for name, count in counts.items()})
    return describe(cache, lists, tokens)


def test_one_hash_for_each_block() -> None:
    assert listed_hashes(None, geometry()) == {}
    assert listed_hashes([b"a", b"b", b"c"], geometry()) == {"kv": [b"a", b"b", b"c"]}
    both = {"w": [b"x"], "f": [b"a", b"b"]}
    assert list(listed_hashes(both, geometry(f=2, w=1))) == ["f", "w"]


def test_a_last_block_that_is_not_full_has_no_name() -> None:
    assert listed_hashes([b"a", b"b"], geometry(tokens=9)) == {"kv": [b"a", b"b"]}
    with pytest.raises(UsageError, match="2 hashes for 3 blocks"):
        listed_hashes([b"a", b"b"], geometry(tokens=12))


@pytest.mark.parametrize(
    ("hashes", "groups", "said"),
    [
        ([b"a"], {}, "1 hashes for 3 blocks of group 'kv'"),
        ([b"a"] * 4, {}, "4 hashes for 3 blocks"),
        ([b"a", 7, b"c"], {}, "one of group 'kv' is not bytes"),
        ([b"a", "b", b"c"], {}, "one of group 'kv' is not bytes"),
        ([b"a", b"b", b"c"], {"f": 2, "w": 1}, "pass {group: hashes} for f, w"),
        ({"f": [b"a", b"b"]}, {"f": 2, "w": 1}, "the groups are f, w"),
        ({"f": [b"a"] * 2, "x": [b"a"]}, {"f": 2, "w": 1}, "the groups are f, w"),
    ],
)
def test_hashes_that_do_not_fit(hashes: Any, groups: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        listed_hashes(hashes, geometry(**groups))


LISTS = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.binary(max_size=3), max_size=4)
)


@given(LISTS, LISTS)
def test_digests_are_equal_exactly_if_the_hashes_are(
    one: dict[str, list[bytes]], other: dict[str, list[bytes]]
) -> None:
    """Wherever one hash ends and the next begins, and whatever the groups' order."""
    same = list(one.items()) == list(other.items())
    assert (digest(one) == digest(other)) == same
    assert len(digest(one)) == (32 if one else 0)


def test_content_takes_the_place_of_hashes() -> None:
    """So two sides that cut it into other blocks compare the same."""
    assert digest({"kv": [b"a"]}, b"x") == digest({"kv": [b"b", b"c"]}, b"x")
    assert len({digest({}, b"x"), digest({}, b"y"), digest({"kv": [b"x"]})}) == 3
    for odd in ("x", b""):
        with pytest.raises(UsageError, match="bytes that identify the tokens"):
            digest({}, odd)


@pytest.mark.parametrize(
    "have",
    [[b"b", b"z"], {b"b"}, {b"b": 1}, (b"b",), lambda name: name == b"b"],
    ids=["list", "set", "dict", "tuple", "predicate"],
)
def test_what_is_here_by_collection_or_predicate(have: Any) -> None:
    lists = {"kv": np.arange(4)}
    found = held(have, {"kv": [b"a", b"b", b"c"]}, lists)
    # The last block has no name, so nobody has it.
    assert found["kv"].tolist() == [False, True, False, False]
    assert found["kv"].dtype == np.bool_
    assert held(None, {}, lists) == {}


@pytest.mark.parametrize("have", [b"b", bytearray(b"b"), "b", [[b"b"]], 5])
def test_what_is_no_collection_of_hashes_is_refused(have: Any) -> None:
    with pytest.raises(UsageError, match="have=: pass a collection of hashes"):
        held(have, {"kv": [b"b"]}, {"kv": np.arange(1)})
