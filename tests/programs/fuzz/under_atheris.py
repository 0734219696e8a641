"""One target under atheris, in this process; see ``python -m tests.programs.fuzz``."""

from __future__ import annotations

import importlib
import sys

import atheris

_INSTRUMENTED = [
    *(
        "kvwire.wire",
        "kvwire.proto",
        "kvwire.endpoint.region",
        "kvwire.transfers.offer",
        "kvwire.kv",
    ),
    *("kvwire.transfers.incoming", "kvwire_store.server.messages", "kvwire.memory"),
    *("kvwire_local", "kvwire_tcp", "kvwire_ucx", "kvwire_nccl"),
]


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    name = sys.argv.pop(1)
    # How libFuzzer starts itself again, where it merges inputs.
    sys.argv[0] = f"{sys.executable} -m tests.programs.fuzz.under_atheris {name}"
    # Whatever imports kvwire imports the core with it, so nothing does before this.
    with atheris.instrument_imports(include=_INSTRUMENTED):
        guard = importlib.import_module("tests.programs.fuzz.guard")
        run = importlib.import_module(f"tests.programs.fuzz.targets.{name}").run

    def one(data: bytes) -> None:
        with guard.nothing_runs():
            run(data)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
