"""Many requests with random aborts and a restarted engine: no wrong token, no leak.

``python -m tests.integrations.vllm.soak --requests 1000`` starts two servers and the
proxy, and compares every whole answer with that of one engine alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.integrations.vllm.models import make_model
from tests.integrations.vllm.serving import (
    Engine,
    complete,
    engine,
    front,
    prompt,
    tokens_of,
)
from tests.support.waiting import eventually

# Prompts come back, so that prefix caches are hit; and are compared once each.
DIFFERENT_PROMPTS = 60


def main() -> int:
    """Run it; the exit status is 1 if anything is wrong or left behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--together", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model("gqa", folder)
        transfer = {"lease_s": 3.0}
        prefill = engine(model, folder, "prefill", 0, transfer)
        decode = engine(model, folder, "decode", 1, transfer)
        proxy = front(prefill, decode, folder)
        processes = (prefill, decode, proxy)
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.wait()
            prompts = [
                prompt(chance.choice([1, 30, 130, 500, 1100, 2000]), seed)
                for seed in range(DIFFERENT_PROMPTS)
            ]
            wanted = [
                tokens_of(prefill.generate(ids, cache_salt="alone")) for ids in prompts
            ]
            counts: Counter[str] = Counter()

            def ask(number: int) -> None:
                ours = random.Random(options.seed * 1_000_003 + number)
                index = ours.randrange(DIFFERENT_PROMPTS)
                patience = ours.choice([0.02, 0.1, 0.3, 120.0, 120.0, 120.0])
                try:
                    answer = complete(proxy.url, prompts[index], timeout=patience)
                except httpx.TimeoutException:
                    counts["stuck" if patience > 1 else "aborted"] += 1
                except httpx.HTTPError:
                    counts["refused"] += 1
                else:
                    right = tokens_of(answer) == wanted[index]
                    counts["right" if right else "wrong"] += 1

            restart = threading.Thread(target=_restart, args=(prefill,))
            with ThreadPoolExecutor(options.together) as pool:
                for number in range(options.requests):
                    pool.submit(ask, number)
                    if number == options.requests // 2:
                        pool.submit(restart.start)
            restart.join()
            idle = eventually(lambda: prefill.idle and decode.idle)
        finally:
            for process in processes:
                process.kill()
    print(f"{options.requests} requests: {dict(counts)}; nothing left behind: {idle}")
    return int(not idle or bool(counts["wrong"] or counts["stuck"]))


def _restart(process: Engine) -> None:
    process.kill()
    process.start()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
