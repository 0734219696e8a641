"""Many requests with random aborts and a killed engine: no wrong token, no leak.

``python -m tests.integrations.vllm.soak --requests 1000`` starts two servers and the
proxy, and compares every whole answer with that of one engine alone. In the middle the
prefill engine is killed and started again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx

from tests.integrations.vllm.models import make_model
from tests.integrations.vllm.pairs import running
from tests.integrations.vllm.serving import (
    Engine,
    Process,
    complete,
    engine,
    front,
    prompt,
    tokens_of,
)
from tests.support.waiting import eventually

# Prompts come back, so that prefix caches are hit; and are compared once each.
DIFFERENT_PROMPTS = 60
OUTCOMES = ("right", "aborted", "wrong", "stuck", "failed")


# A client that waits so long for an answer has been forgotten.
STUCK_S = 120.0
# A client that goes away does so after one of these; most stay.
PATIENCE_S = (0.02, 0.1, 0.3, STUCK_S, STUCK_S, STUCK_S)


def main() -> int:
    """Run it; the exit status is 1 if anything is wrong or left behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--fresh", action="store_true", help="decode keeps no prompt and fetches each"
    )
    options = parser.parse_args()
    chance = random.Random(options.seed)
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model("gqa", folder)
        transfer = {"lease_s": 3.0}
        prefill = engine(model, folder, "prefill", 0, transfer)
        more = ["--no-enable-prefix-caching"] if options.fresh else []
        decode = engine(model, folder, "decode", 1, transfer, *more)
        proxy = front(prefill, decode, folder)
        stack.enter_context(running(prefill, decode, proxy))
        prompts = [
            prompt(chance.choice([1, 30, 130, 500, 1100, 2000]), seed)
            for seed in range(DIFFERENT_PROMPTS)
        ]
        wanted = [
            tokens_of(prefill.generate(ids, cache_salt="alone")) for ids in prompts
        ]
        counts = _ask(proxy, prefill, prompts, wanted, options)
        fetched = decode.metric("vllm:external_prefix_cache_hits_total")
        left = [
            name
            for name, one in (("prefill", prefill), ("decode", decode))
            if not eventually(partial(getattr, one, "idle"))
        ]
    print(
        f"{options.requests} requests in {time.monotonic() - began:.0f} s: "
        + ", ".join(f"{counts[name]} {name}" for name in OUTCOMES)
        + f"; prefill was killed once; decode fetched the KV of {fetched:.0f} tokens; "
        + f"engines that still have requests or blocks: {', '.join(left) or 'none'}"
    )
    return int(bool(left) or any(counts[n] for n in ("wrong", "stuck", "failed")))


def _ask(
    proxy: Process,
    prefill: Engine,
    prompts: list[list[int]],
    wanted: list[list[int]],
    options: argparse.Namespace,
) -> Counter[str]:
    """Ask for all of them; how many answers were of which kind."""

    def restart() -> None:
        prefill.kill()
        prefill.start()
        prefill.wait()

    restarting = threading.Thread(target=restart)

    def ask(number: int) -> str:
        if number == options.requests // 2:
            restarting.start()
        ours = random.Random(options.seed * 1_000_003 + number)
        index = ours.randrange(len(prompts))
        patience_s = ours.choice(PATIENCE_S)
        try:
            answer = complete(proxy.url, prompts[index], timeout=patience_s)
        except httpx.TimeoutException:
            return "stuck" if patience_s == STUCK_S else "aborted"
        except httpx.HTTPError:
            return "failed"
        return "right" if tokens_of(answer) == wanted[index] else "wrong"

    with ThreadPoolExecutor(options.together) as pool:
        counts = Counter(pool.map(ask, range(options.requests)))
    restarting.join()
    return counts


if __name__ == "__main__":
    sys.exit(main())
