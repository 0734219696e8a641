"""The releases of vLLM that the connectors support.

vLLM's interface for connectors changes with each release, and has defaults: if a
connector does not mention a feature, such as sleep mode, vLLM assumes that it supports
it. So ``packages/vllm/tests/interface.json`` lists each supported release's
interface, and a test fails if a connector neither overrides a method nor has a reason
not to.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from kvwire.errors import UsageError

logger: logging.Logger = logging.getLogger("kvwire.vllm")

OLDEST: Final = (0, 30)
NEWEST: Final = (0, 33)
UNTESTED: Final = "untested_vllm"
"""The key that allows other releases."""
NO_SLEEP: Final = (
    "an engine that sleeps frees the memory of its KV caches, which kvwire may be "
    "reading or writing: start it without --enable-sleep-mode"
)


def check_release(version: str, *, untested: bool) -> None:
    """Refuse an untested release of vLLM, unless ``untested_vllm`` is set."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if untested:
        logger.warning(
            "vLLM %s: kvwire was tested with %s; %s is set", version, tested, UNTESTED
        )
        return
    above = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    raise UsageError(
        f"vLLM {version}: kvwire was tested with {tested}; with other versions it "
        "might move wrong KV unnoticed: pip install "
        f"'vllm>={OLDEST[0]}.{OLDEST[1]},<{above}', or try this one with "
        f'"{UNTESTED}": true beside '
        "kvwire's keys"
    )


def check_sleep(model_config: object) -> None:
    """Refuse sleep mode, which frees caches while kvwire may read or write them."""
    if getattr(model_config, "enable_sleep_mode", False):
        raise UsageError(f"enable_sleep_mode: {NO_SLEEP}")
