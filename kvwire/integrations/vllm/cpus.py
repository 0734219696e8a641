"""The CPUs that vLLM reserves for connectors where the model runs on CPUs.

There vLLM binds the threads that compute to cores of their own, one core fewer for each
rank if a connector is configured. A thread that kvwire starts would inherit the binding
and delay the forward pass, while the reserved core idles.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvwire.config import Config


def beside_compute(config: Config, vllm_config: Any) -> Config:
    """Return a configuration whose thread keeps off the cores that compute.

    It is unchanged if it names CPUs, or if the model does not run on CPUs.
    """
    if config.io_cpus or vllm_config.device_config.device_type != "cpu":
        return config
    return config.replace(io_cpus=own_reserved_cpus())


def reserved_cpus(allowed: set[int], threads: Collection[set[int]]) -> tuple[int, ...]:
    """Return the allowed CPUs to which no thread is bound; none if no thread is bound.

    Args:
        allowed: The CPUs that the process may use.
        threads: The CPUs of each thread that may be bound.
    """
    bound = set[int]().union(*(cpus for cpus in threads if cpus < allowed))
    return tuple(sorted(allowed - bound)) if bound else ()


def own_reserved_cpus() -> tuple[int, ...]:
    """Return the CPUs that vLLM left to this worker's connectors; often none.

    The parent process has no threads that compute, so it shows what vLLM may use. Its
    other children are the workers of other ranks.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    parent = os.getppid()
    allowed = set[int]()
    processes = {os.getpid()}
    with suppress(OSError):
        allowed = os.sched_getaffinity(parent)
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        processes.update(map(int, text.split()))
    threads: list[set[int]] = []
    for process in processes:
        with suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):  # it ended meanwhile
                    threads.append(os.sched_getaffinity(int(thread.name)))
    return reserved_cpus(allowed, threads)
