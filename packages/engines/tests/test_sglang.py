"""The HiCache backend, loaded by SGLang's factory and compared with its own of files.

`make test-sglang` runs this; without SGLang every test is skipped. SGLang's package is
not run, which would ask for a GPU: what its interface needs is imported without it.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwire import UsageError

_FOUND = importlib.util.find_spec("sglang")
if _FOUND is None:
    pytest.skip(
        "sglang is not installed here; `make test-sglang` installs it",
        allow_module_level=True,
    )

_package = types.ModuleType("sglang")
_package.__path__ = list(_FOUND.submodule_search_locations or ())
sys.modules.setdefault("sglang", _package)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, while it is imported
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheFile,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE, PAGES = 4, 8
HASHES = [f"{number:064x}" for number in range(PAGES)]


class HostPool:
    """A pool of the host, as SGLang's with ``layer_first``: 2 layers, K and V."""

    layout, page_size = "layer_first", PAGE

    def __init__(self, seed: int = 0, dtype: Any = torch.bfloat16) -> None:
        chance = torch.Generator().manual_seed(seed)
        shape = (2, 2, PAGE * PAGES, 3, 8)
        self.dtype = dtype
        self.kv_buffer = torch.zeros(shape, dtype=dtype)
        if seed:
            self.kv_buffer += torch.randn(shape, generator=chance).to(dtype)

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        return self.kv_buffer[:, :, index : index + PAGE].flatten()

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, page: Any) -> None:
        self.kv_buffer[:, :, index : index + PAGE] = page.reshape(2, 2, PAGE, 3, 8)


class LargePages(HostPool):
    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(5000, dtype=torch.uint8)


Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a backend as SGLang does, with two pools of its own."""
    made: list[Any] = []

    def one(pool: HostPool, **changes: Any) -> Any:
        extra = {
            "backend_name": "kvwire",
            "module_path": "kvwire_engines.sglang",
            "class_name": "KvwireHiCacheStorage",
            "tiers": ["memory:1MiB", f"disk:{tmp_path}/kv?size=4MiB"],
            "fingerprint": "w",
            **changes.pop("extra", {}),
        }
        fields: dict[str, Any] = {
            **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
            **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
            **dict.fromkeys(("is_mla_model", "enable_storage_metrics"), False),
            "is_page_first_layout": False,
            "model_name": "org/model",
            "extra_config": extra,
        }
        config = HiCacheStorageConfig(**fields | changes)
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        made.append(backend)
        registered(backend, pool)
        return backend

    yield one
    for backend in made:
        backend.close()


def registered(backend: Any, pool: HostPool) -> None:
    backend.register_mem_pool_host(pool)
    for name in (PoolName.KV, PoolName.MAMBA):
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()


def tokens(*pages: int) -> Any:
    return torch.tensor([page * PAGE + at for page in pages for at in range(PAGE)])


def test_pages_outlive_the_engine(make: Make) -> None:
    """As the controller calls it, with and without ``interface_v1``."""
    source = HostPool(seed=1)
    first = make(source)
    assert first.batch_set_v1(HASHES[:2], tokens(0, 1)) == [True, True]
    pages = [source.get_data_page(2 * PAGE), source.get_data_page(3 * PAGE)]
    assert first.batch_set(HASHES[2:4], pages)
    first.close()
    target = HostPool()
    second = make(target)
    assert second.batch_exists(HASHES) == 4
    assert second.exists(HASHES[3])
    assert not second.exists(HASHES[4])
    asked = [HASHES[2], HASHES[5], HASHES[0]]
    assert second.batch_get_v1(asked, tokens(7, 6, 5)) == [True, False, True]
    for there, here in ((2, 7), (0, 5)):
        assert torch.equal(
            source.get_data_page(there * PAGE), target.get_data_page(here * PAGE)
        )
    assert not target.get_data_page(6 * PAGE).any()
    into = [target.get_dummy_flat_data_page() for _ in range(2)]
    got = second.batch_get([HASHES[1], HASHES[6]], into)
    assert got[0] is into[0]
    assert torch.equal(got[0], source.get_data_page(PAGE))
    assert got[1] is None
    assert second.clear()
    assert second.batch_exists(HASHES) == 0


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_name": "another"}, 0),
        ({"extra": {"fingerprint": "tuned"}}, 0),
        ({"tp_rank": 1, "tp_size": 2}, 0),
        ({"pp_size": 2}, 0),
        ({"attn_cp_rank": 1, "attn_cp_size": 2}, 0),
        ({"is_mla_model": True}, 0),
        ({"enable_storage_metrics": True}, 1),
    ],
    ids=str,
)
def test_what_another_engine_has_put(make: Make, changes: Any, found: int) -> None:
    first = make(HostPool(seed=1))
    first.batch_set_v1(HASHES[:1], tokens(0))
    first.close()
    assert make(HostPool(), **changes).batch_exists(HASHES[:1]) == found


def test_weights_have_names(make: Make, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    changes = {"model_name": str(model), "extra": {"fingerprint": ""}}
    for weights, found in ((b"one", 0), (b"one", 1), (b"two", 0)):
        (model / "model.bin").write_bytes(weights)
        backend = make(HostPool(seed=1), **changes)
        assert backend.batch_exists(HASHES[:1]) == found
        backend.batch_set_v1(HASHES[:1], tokens(0))
        backend.close()


def test_mla_is_kept_once_for_all_ranks(make: Make) -> None:
    mamba = PoolTransfer(PoolName.MAMBA, tokens(0), keys=HASHES[:1])
    for rank, found in ((0, 0), (1, 1), (0, 1)):
        backend = make(HostPool(seed=1), is_mla_model=True, tp_rank=rank, tp_size=2)
        assert backend.batch_exists(HASHES[:1]) == found
        backend.batch_set_v1(HASHES[:1], tokens(0))
        if rank == 0:
            backend.batch_set_v2([mamba])
        hit = backend.batch_exists_v2(HASHES[:1], [mamba])
        assert hit.kv_hit_pages == (rank == 0)
        backend.close()


@pytest.mark.parametrize("policy", ["ALL_PAGES", "TRAILING_PAGES"])
@pytest.mark.parametrize("kept", [(), (0,), (1, 2), (0, 1, 2, 3), (3,), (0, 2, 3)])
def test_it_answers_as_sglangs_own(
    make: Make, tmp_path: Path, policy: str, kept: tuple[int, ...]
) -> None:
    """Pages of two pools, of which one has gaps."""
    source, target = HostPool(seed=1), HostPool()
    ours = make(source)
    theirs = HiCacheFile(ours._config, str(tmp_path / "files"))
    registered(theirs, source)
    states = PoolTransfer(
        PoolName.MAMBA, tokens(*kept), keys=[HASHES[page] for page in kept]
    )
    window = PoolTransfer(
        PoolName.MAMBA,
        tokens(0, 1),
        keys=HASHES[:2],
        hit_policy=PoolHitPolicy[policy],
    )
    said = []
    for backend in (theirs, ours):
        put = backend.batch_set_v2(
            [PoolTransfer(PoolName.KV, tokens(0, 1, 2, 3), keys=HASHES[:4]), states]
        )
        there = backend.batch_exists_v2(HASHES, [window])
        registered(backend, target)
        got = backend.batch_get_v2([window])
        said.append((put, there, got, target.kv_buffer.clone()))
        target.kv_buffer.zero_()
    assert said[0][:3] == said[1][:3]
    assert torch.equal(said[0][3], said[1][3])


def test_what_cannot_be_done_is_said(make: Make) -> None:
    backend = make(HostPool(seed=1))
    assert backend.batch_set_v1(HASHES[:2], tokens(0)) == [False, False]
    assert backend.batch_get_v1(HASHES[:2], None) == [False, False]
    assert backend.batch_get_v1([], tokens()) == []
    backend.batch_set_v1(HASHES[:1], tokens(0))
    groups = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    with pytest.raises(UsageError, match="BLOCK_GROUPS"):
        backend.batch_exists_v2(HASHES[:1], [groups])
    backend.close()
    backend.close()
    assert backend.batch_exists(HASHES[:1]) == 0
    assert not backend.set(HASHES[0], HostPool().get_data_page(0))
    assert backend.get(HASHES[0], HostPool().get_data_page(0)) is None
    with pytest.raises(UsageError, match=r"model='org/model': neither a path.*finger"):
        make(HostPool(), extra={"fingerprint": ""})
    with pytest.raises(
        UsageError, match=r"a block of .* has no room in a slab of 4096"
    ):
        make(LargePages(), extra={"tiers": ["memory:64KiB?slab=4KiB"]})
    named = dict(backend._config.extra_config)
    del named["tiers"]
    with pytest.raises(UsageError, match='add "tiers"'):
        make(HostPool(), extra_config=named)
