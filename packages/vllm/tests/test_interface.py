"""vLLM's interface, release by release, and what kvwire makes of each part of it.

``interface.json`` has what each supported release offers, and
``packages.vllm.tests.programs.interface`` writes it from a wheel. So all but one of
these tests need no vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import kvwire_vllm
from kvwire_vllm.release import NEWEST, OLDEST
from packages.vllm.tests.programs.interface import (
    Members,
    classes_in,
    differences,
    interface_of,
    recorded,
)

RELEASES = recorded()
_ROOM = Path(kvwire_vllm.__file__).parent


def _own(path: str, name: str) -> Members:
    return classes_in((_ROOM / path).read_text())[name]


_HOOKS = _own("hooks.py", "ConnectorHooks")

# Our classes, and the classes of vLLM that they extend.
OURS: dict[str, tuple[Members, tuple[str, ...]]] = {
    "KvwireConnector": (
        _HOOKS | _own("connector.py", "KvwireConnector"),
        ("KVConnectorBase_V1", "SupportsHMA"),
    ),
    "KvwireStoreConnector": (
        _HOOKS | _own("store/connector.py", "KvwireStoreConnector"),
        ("KVConnectorBase_V1",),
    ),
    "KvwireStats": (_own("stats.py", "KvwireStats"), ("KVConnectorStats",)),
    "KvwirePromMetrics": (
        _own("stats.py", "KvwirePromMetrics"),
        ("KVConnectorPromMetrics",),
    ),
}

_CONNECTOR_LEFT = {
    "role": "vLLM's own record of what it was made with",
    "clear_connector_metadata": "the worker's side keeps what it needs of a step",
    "has_connector_metadata": "likewise",
    "restore_kv_caches": "no engine with kvwire sleeps",
    "set_host_xfer_buffer_ops": "bytes go from the caches themselves, or kvwire's copy",
    "finish_forward": "blocks are held until they have drained, not until a pass ends",
    "reset_capture_state": "nothing is recorded in a CUDA graph",
    "get_mem_pool_context": "caches lie in memory of vLLM's own kind",
    "get_finished_count": "None: every rank reports each request",
    "get_kv_connector_kv_cache_events": "vLLM publishes its own blocks' events",
    "take_events": "likewise",
    "bind_gpu_block_pool": "block ids from vLLM's calls suffice",
    "bind_kv_cache_manager": "likewise",
    "get_external_cache_hit_sources": "only the label of a metric",
    "_cache_hit_source": "likewise",
    "get_required_kvcache_layout": "None: any",
    "requires_kv_delivery": "a preempted request's reference is never given out",
    "supports_divergent_local_hybrid_hits": "False: vLLM reconciles its groups' hits",
    "register_finished_partial_tail": "False: such tails are vLLM's own offloading",
    "has_pending_block_frees": "False: waiting for a peer would hold up a step",
}
LEFT: dict[str, dict[str, str]] = {
    "KvwireConnector": _CONNECTOR_LEFT
    | {
        "has_pending_push_work": "requests whose blocks are held keep an engine awake",
        "reset_cache": "nothing is kept beyond vLLM's own blocks",
    },
    "KvwireStoreConnector": _CONNECTOR_LEFT
    | {
        "build_connector_worker_meta": "workers report requests and blocks, no more",
        "get_handshake_metadata": "ranks are found by a file on their host",
        "set_xfer_handshake_metadata": "likewise",
        "set_xfer_handshake_metadata_pp_aware": "likewise",
        "get_loaded_kv_cache_group_ids": "the only group, which hashes name",
        "get_transfer_results": "made of get_finished; lost blocks are in the errors",
        "requires_piecewise_for_cudagraph": "False: no layer is waited for",
    },
    "KvwireStats": {
        "to_dict": "vLLM's own way to write the class",
    },
    "KvwirePromMetrics": {},
}

# What kvwire reads or sets of vLLM's records.
USED = {
    "KVConnectorOutput": (
        *("finished_sending", "finished_recving", "kv_connector_worker_meta"),
    ),
    "KVConnectorWorkerMetadata": ("aggregate",),
    "KVConnectorTransferResults": (
        *("finished_sending", "finished_recving", "failed_recving"),
    ),
    "KVConnectorFactory": ("register_connector",),
    "KVConnectorRole": ("SCHEDULER", "WORKER"),
    "KVTransferConfig": (
        *("kv_connector_extra_config", "engine_id", "kv_role"),
        "kv_connector_module_path",
    ),
    "SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        "preempted_req_ids",
    ),
    "NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "new_block_ids", "num_computed_tokens"),
    "KVCacheConfig": ("kv_cache_groups",),
    "KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "KVCacheSpec": ("block_size",),
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
}


def _offered(name: str) -> dict[str, list[str]]:
    """Return all members that vLLM offers to a class of ours, with their releases."""
    found: dict[str, list[str]] = {}
    for release in RELEASES:
        for base in OURS[name][1]:
            for member in RELEASES[release][base]:
                found.setdefault(member, []).append(release)
    return found


def test_each_supported_release_is_recorded() -> None:
    assert OLDEST[0] == NEWEST[0]
    supported = range(OLDEST[1], NEWEST[1] + 1)
    assert list(RELEASES) == [f"{OLDEST[0]}.{number}" for number in supported]


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_inherited_unseen(name: str) -> None:
    """A member that vLLM offers is overridden, or left for a reason."""
    members, _ = OURS[name]
    offered = _offered(name)
    unseen = [
        f"{member} (vLLM {', '.join(releases)})"
        for member, releases in offered.items()
        if member not in members and member not in LEFT[name] and member != "data"
    ]
    assert not unseen, f"override them in {name}, or give a reason in LEFT"
    stale = [one for one in LEFT[name] if one in members or one not in offered]
    assert not stale, f"LEFT has reasons for what {name} overrides, or vLLM lacks"


@pytest.mark.parametrize("name", OURS)
def test_what_is_overridden_exists(name: str) -> None:
    members, _ = OURS[name]
    offered = _offered(name)
    own = [one for one in members if not one.startswith("_") and one not in offered]
    assert not own, "no release calls these"


@pytest.mark.parametrize("name", OURS)
def test_overrides_take_what_each_release_passes(name: str) -> None:
    members, bases = OURS[name]
    wrong: list[str] = []
    for release in RELEASES:
        for base in bases:
            for member, theirs in RELEASES[release][base].items():
                ours = members.get(member)
                if ours is not None:
                    wrong += _unfit(f"{release} {base}.{member}", theirs, ours)
    assert not wrong


def _unfit(where: str, theirs: str, ours: str) -> list[str]:
    """Return why our method cannot stand for vLLM's; vLLM passes names too."""
    if theirs.startswith((":", "=")):
        return []
    marks = re.compile(r"@(classmethod|property|staticmethod)")
    if marks.findall(theirs) != marks.findall(ours):
        return [f"{where}: {theirs}, and ours is {ours}"]
    wanted, given = _arguments(theirs), _arguments(ours)
    names = [one.arg for one in wanted.args]
    here = [one.arg for one in given.args]
    needed = here[: len(here) - len(given.defaults)]
    more = [one for one in needed if one not in names]
    lacking = [one for one in names if one not in here]
    if lacking or more or (wanted.kwarg and not given.kwarg):
        return [f"{where}: {theirs}, and ours is {ours}"]
    return []


def _arguments(signature: str) -> ast.arguments:
    text = re.sub(r"^(@[\w.]+ )*", "", signature)
    (made,) = ast.parse(f"def f{text}: ...").body
    assert isinstance(made, ast.FunctionDef)
    return made.args


@pytest.mark.parametrize("name", USED)
def test_what_is_read_by_name_is_in_each_release(name: str) -> None:
    lacking = {
        release: missing
        for release in RELEASES
        if (
            missing := [one for one in USED[name] if one not in RELEASES[release][name]]
        )
    }
    assert not lacking


def test_the_page_has_names_that_kvwire_reads() -> None:
    """What is used beyond the interface; a row whose names are gone goes too."""
    page = Path(__file__).with_name("beyond_interface.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 50
    text = "".join(path.read_text() for path in _ROOM.rglob("*.py"))
    assert not [name for name in named if not re.search(rf"{name}\b", text)]


def test_the_installed_release_is_as_recorded() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vllm is not installed here; `make test-vllm` installs it")
    release, offered = interface_of(Path(found.origin).parents[1])
    newest = list(RELEASES)[-1]
    lines = differences(RELEASES.get(release, RELEASES[newest]), offered)
    known = release in RELEASES
    assert known, "\n".join(
        [f"vLLM {release} is not recorded; since {newest}:", *lines]
    )
    assert not lines


def test_the_next_release_is_a_list() -> None:
    """By a class that loses, gains and changes a method."""
    before = classes_in("class A:\n def a(self, x): ...\n def b(self): ...\n")
    after = classes_in("class A:\n def a(self, x, y='z'): ...\n def c(self): ...\n")
    assert differences(before, after) == [
        "different: A.a (self, x) -> (self, x, y='z')",
        "gone: A.b (self)",
        "new: A.c (self)",
    ]
