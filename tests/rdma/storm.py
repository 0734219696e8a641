"""Transfers between two hosts under random faults, for a number of seconds.

    python -m tests.rdma.storm --seconds 600

In each round an owner and a reader move some transfers, and one fault falls into them:
a process is killed, the cable is out, a machine stands still, packets are lost. The
seed is printed, and `--seed` repeats its faults. It ends with status 1 if a byte was
wrong or late, a round did not end, or a process ended that nobody had killed.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.rdma.hosts import PYTHON, Host, HostError, free_port, let_pass, two

MOVER: Final = f"{PYTHON} -m tests.rdma.mover"
TRANSFERS: Final = 4  # of each round
BLOCKS: Final = 64  # 16 MiB
DEADLINE_S: Final = 60.0
# How long a round may take before it counts as stuck.
ROUND_S: Final = 300.0
BAD: Final = ("wrong", "late", "stuck", "ended by others")

Fault = Callable[[Host, Host, random.Random], str]


def _nothing(first: Host, second: Host, chance: random.Random) -> str:
    return ""


def _owner_killed(first: Host, second: Host, chance: random.Random) -> str:
    first.stop("owner", "KILL")
    return "owner"


def _reader_killed(first: Host, second: Host, chance: random.Random) -> str:
    second.stop("reader", "KILL")
    return "reader"


def _cable_out(first: Host, second: Host, chance: random.Random) -> str:
    host = chance.choice((first, second))
    host.unplug(chance.uniform(0.2, 6))
    return ""


def _machine_stands_still(first: Host, second: Host, chance: random.Random) -> str:
    host = chance.choice((first, second))
    host.stand_still(chance.uniform(0.2, 6))
    return ""


def _packets_lost(first: Host, second: Host, chance: random.Random) -> str:
    host = chance.choice((first, second))
    host.impair(f"loss {chance.uniform(1, 5):.1f}%", chance.uniform(1, 4))
    return ""


FAULTS: Final[dict[str, Fault]] = {
    "nothing": _nothing,
    "owner killed": _owner_killed,
    "reader killed": _reader_killed,
    "cable out": _cable_out,
    "machine stands still": _machine_stands_still,
    "packets lost": _packets_lost,
}


def play(hosts: tuple[Host, Host], name: str, chance: random.Random) -> Counter[str]:
    """Play one round, and return what it came to."""
    first, second = hosts
    options = f"--count {TRANSFERS} --blocks {BLOCKS} --deadline {DEADLINE_S:g}"
    first.start("owner", f"{MOVER} serve {options}")
    found: Counter[str] = Counter()
    try:
        first.wait_for("owner", "listening")
        second.start("reader", f"{MOVER} pull {options}")
        second.wait_for("reader", '{"transfer": 0')
        let_pass(chance.uniform(0, 1.5))
        killed = FAULTS[name](first, second, chance)
        ended = [("reader", second.wait_for("reader", "rig-status", ROUND_S))]
        first.stop("owner", "TERM")
        ended.append(("owner", first.wait_for("owner", "rig-status", ROUND_S)))
    except HostError as exc:
        print(exc)
        found["stuck"] += 1
        for host, process in ((first, "owner"), (second, "reader")):
            host.stop(process, "KILL")
        return found
    for process, printed in ended:
        if process != killed and "rig-status 0" not in printed.splitlines():
            found["ended by others"] += 1
            print(f"{process}:\n{printed}")
    for line in second.printed("reader").splitlines():
        if line.startswith("{"):
            transfer = json.loads(line)
            found[transfer["state"]] += 1
            found["over verbs"] += "_verbs/" in transfer["way"]
        elif line.startswith("summary "):
            summary = json.loads(line.removeprefix("summary "))
            found["wrong"] += summary["wrong"]
            found["late"] += summary["late"]
    return found


def main() -> int:
    """Play rounds until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--fault", choices=list(FAULTS), help="this one alone")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    total: Counter[str] = Counter(dict.fromkeys(BAD, 0))
    with (
        tempfile.TemporaryDirectory() as out,
        two(Path(out), free_port(), life_s=options.seconds + 2 * ROUND_S) as hosts,
    ):
        end = time.monotonic() + options.seconds
        waiting: list[str] = []
        while time.monotonic() < end:
            # Each comes once before any comes again.
            waiting = waiting or chance.sample(list(FAULTS), len(FAULTS))
            name = options.fault or waiting.pop()
            found = play(hosts, name, chance)
            total.update(found)  # with what is 0
            total["rounds"] += 1
            print(f"{total['rounds']}: {name}: {dict(found)}", flush=True)
    print("all", json.dumps(total), flush=True)
    return 1 if any(total[what] for what in BAD) else 0


if __name__ == "__main__":
    sys.exit(main())
