"""A store as a secondary tier for vLLM's own OffloadingConnector.

vLLM loads it as an entry of ``secondary_tiers``::

    {"type": "KvwireTier", "tiers": ["memory:1GiB", "disk:/var/kv?size=100GiB"],
     "name": "llama-3.1-8b"}

All its methods run in the scheduler and return at once. A job is over when the store no
longer touches vLLM's memory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, ClassVar, Final

from kvwire.errors import UsageError, without_password
from kvwire.extras import needed_by
from kvwire.kv.spec import KVSpec
from kvwire_store.pages import PageStore
from kvwire_store.store import Write
from kvwire_store.weights import weights_name
from kvwire_vllm.release import check_release

with needed_by("KvwireTier", command="pip install 'vllm<0.34'"):
    import vllm
    from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

# vLLM 0.30 passes no back-pressure detector to a tier, and reports no job times.
_OLDEST: Final = (0, 31)


class KvwireTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not typed
    """Keeps the chunks of vLLM's primary tier in a store.

    Args:
        offloading_spec: vLLM's own spec.
        primary_kv_view: vLLM's memory, one row per chunk.
        tier_type: The name that vLLM uses.
        tiers: As in :meth:`kvwire_store.BlockStore.open`.
        write: As in :meth:`kvwire_store.BlockStore.open`.
        name: Distinguishes models and layouts; engines that share a store use the same
            name. By default it is derived from weights, layout and ranks.
        backpressure_detector: vLLM's own detector.
        untested_vllm: Start even if kvwire was not tested with this release of vLLM.
    """

    medium: ClassVar[Any] = Medium.STORAGE
    # Jobs end at any time; vLLM looks for ended ones once per step.
    tolerates_off_thread_polling: ClassVar[bool] = False

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        tiers: Sequence[str],
        write: Write = "through",
        name: str = "",
        backpressure_detector: Any = None,
        untested_vllm: bool = False,
    ) -> None:
        check_release(vllm.__version__, untested=untested_vllm, oldest=_OLDEST)
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector
        )
        name = name or _name(offloading_spec.config)
        self._info = {
            "kvwire_tiers": " ".join(map(without_password, tiers)),
            "kvwire_write": write,
        }
        self._store = PageStore(tiers, write=write, name=name)
        self._pages = self._store.pages(primary_kv_view)
        try:
            self._store.require_room(self._pages)
        except BaseException:
            self._store.close()
            raise
        self._jobs: dict[int, tuple[Any, Future[list[bool]]]] = {}
        # The lookups that requests wait for, by request and key.
        self._asked: dict[str, dict[bytes, Future[list[bool]]]] = {}

    def lookup(self, key: bytes, req_context: Any) -> Any:
        asked = self._asked.setdefault(req_context.req_id, {})
        if key not in asked:
            asked[key] = self._store.present([key], self._pages)
        if not asked[key].done():
            return LookupResult.RETRY
        (there,) = asked.pop(key).result()
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._begin(job_metadata, self._store.put)

    def submit_load(self, job_metadata: Any) -> None:
        self._begin(job_metadata, self._store.get)

    def get_finished_jobs(self) -> Iterable[Any]:
        over = [number for number, (_, moved) in self._jobs.items() if moved.done()]
        return [_result(*self._jobs.pop(number), self._pages.spec) for number in over]

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._asked.pop(req_context.req_id, None)

    def drain_jobs(self) -> None:
        """Wait until nothing touches vLLM's memory."""
        wait([moved for _, moved in self._jobs.values()])

    @classmethod
    def config_info_keys(cls, tier_config: Mapping[str, Any]) -> tuple[str, ...]:
        return ("kvwire_tiers", "kvwire_write")

    def config_info(self) -> Mapping[str, str]:
        return self._info

    def shutdown(self) -> None:
        self._store.close()

    def _begin(self, job: Any, move: Any) -> None:
        keys = [bytes(key) for key in job.keys]
        self._jobs[job.job_id] = (job, move(keys, self._pages, job.chunk_ids))


def _name(config: Any) -> str:
    """Return a name for the content of the chunks in vLLM's primary tier."""
    model = config.model
    ranks = config.parallel
    try:
        weights = weights_name(model.name)
    except UsageError as exc:
        raise UsageError(
            f'secondary_tiers: {exc}; set "name" to a text that identifies weights '
            "and layout, the same in all engines that share KV"
        ) from None
    sizes = (ranks.tp_size, ranks.pp_size, ranks.pcp_size, ranks.dcp_size)
    tokens = [group.tokens_per_block for group in config.groups]
    layout = (config.kv_cache_layout, model.dtype, tokens, config.cache, sizes)
    return f"{weights} {hashlib.sha256(repr(layout).encode()).hexdigest()[:32]}"


def _result(job: Any, moved: Future[list[bool]], spec: KVSpec) -> Any:
    """Return a job's result, key by key."""
    landed = moved.result() if moved.exception() is None else [False] * len(job.keys)
    keys: Collection[Any] = [
        key for key, one in zip(job.keys, landed, strict=True) if one
    ]
    return JobResult(
        job_id=job.job_id,
        success=all(landed),
        successful_keys=keys,
        transfer_time=time.monotonic() - job.submit_time,
        transfer_bytes=len(keys) * spec.block_bytes,
    )
