"""Transfers between two hosts under random faults, for a number of seconds.

    python -m tests.rdma.storm --seconds 600
    python -m tests.rdma.storm --seconds 600 --seed 7 --first 40

In each round an owner and a reader move some transfers, and one fault falls into them:
a process is killed, the cable is out, a machine stands still, packets are lost, a
device is removed. The seed is printed; with `--seed` and the number of a round the
storm goes on from there. It ends with status 1 if a byte was wrong or late, a round did
not end, or a process ended that nobody had killed.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.rdma.hosts import MOVER, Host, HostError, free_port, two

TRANSFERS: Final = 100  # of each round
AT_ONCE: Final = 20
MIB: Final = 1  # of each transfer
FRAGMENTS: Final = "4 32 128 256"  # KiB
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


def _device_removed(first: Host, second: Host, chance: random.Random) -> str:
    """The kernel waits for those who use it, and they go on."""
    host = chance.choice((first, second))
    host.start("removal", "rdma link del rxe0")
    return ""


FAULTS: Final[dict[str, Fault]] = {
    "nothing": _nothing,
    "owner killed": _owner_killed,
    "reader killed": _reader_killed,
    "cable out": _cable_out,
    "machine stands still": _machine_stands_still,
    "packets lost": _packets_lost,
    "device removed": _device_removed,
}
NO_REMOVAL: Final = "until ! busybox pidof rdma; do sleep 0.1; done >/dev/null"
DEVICE: Final = (
    "[ -e /sys/class/infiniband/rxe0 ] || rdma link add rxe0 type rxe netdev eth0"
)


def play(hosts: tuple[Host, Host], name: str, chance: random.Random) -> Counter[str]:
    """Play one round, and return what it came to."""
    first, second = hosts
    options = f"--count {TRANSFERS} --at-once {AT_ONCE} --mib {MIB}"
    options += f" --fragments {FRAGMENTS} --deadline {DEADLINE_S:g}"
    first.start("owner", f"{MOVER} serve {options}")
    found: Counter[str] = Counter()
    try:
        second.start("reader", f"{MOVER} pull --once-lost {options}")
        moment = chance.randrange(1, TRANSFERS - AT_ONCE)
        second.wait_for("reader", f'"after": {moment},')
        killed = FAULTS[name](first, second, chance)
        ended = [("reader", second.wait_for("reader", "rig-status", ROUND_S))]
        first.stop("owner", "TERM")
        ended.append(("owner", first.wait_for("owner", "rig-status", ROUND_S)))
        for host in hosts:
            host.run(f"{NO_REMOVAL}; {DEVICE}")
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


def fault_of(seed: int, number: int) -> str:
    """Return the fault of a round: each comes once before any comes again."""
    cycle, place = divmod(number, len(FAULTS))
    return random.Random(f"{seed} faults {cycle}").sample(list(FAULTS), len(FAULTS))[
        place
    ]


def main() -> int:
    """Play rounds until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="the round to begin with")
    parser.add_argument("--fault", choices=list(FAULTS), help="this one alone")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    total: Counter[str] = Counter(dict.fromkeys(BAD, 0))
    with (
        tempfile.TemporaryDirectory() as out,
        two(Path(out), free_port(), life_s=options.seconds + 2 * ROUND_S) as hosts,
    ):
        end = time.monotonic() + options.seconds
        for number in itertools.count(options.first):
            if time.monotonic() > end:
                break
            chance = random.Random(f"{options.seed} {number}")
            name = options.fault or fault_of(options.seed, number)
            found = play(hosts, name, chance)
            total.update(found)  # with what is 0
            total["rounds"] += 1
            print(f"{number}: {name}: {dict(found)}", flush=True)
    print("all", json.dumps(total), flush=True)
    return 1 if any(total[what] for what in BAD) else 0


if __name__ == "__main__":
    sys.exit(main())
