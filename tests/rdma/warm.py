"""Starts programs in a guest with their imports done, which take 10 s there each time.

This process has imported them, and forks for each line of its FIFO. The child has the
environment, the arguments and the outputs of the shell whose function `warm` wrote it:

    warm tests.rdma.mover serve --count 20
"""

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

FIFO: Final = "/run/warm"
# What a shell needs; the status of `warm` is that of the program.
FUNCTION: Final = f"""
warm() {{
  local job status
  job=$(mktemp -d /run/job.XXXXXX)
  mkfifo $job/ended
  env -0 >$job/environment
  printf '%s\\0' "$@" >$job/arguments
  echo $job $BASHPID >{FIFO}
  read status <$job/ended
  rm -r $job
  return $status
}}
"""
# In the environment: a file that gets the id of the program's process.
PID: Final = "WARM_PID"
# pytest rewrites its tests, so it must be the first who imports them.
ONE_HOST: Final = (
    *("pytest", "pytest_asyncio", "hypothesis", "uvloop", "cryptography.x509"),
    "kvwire_certify.conformance.command",
)
TWO_HOSTS: Final = ("tests.rdma.mover", "tests.rdma.windows", "tests.rdma.ends")


def main() -> None:
    """Fork for each line, for ever."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Open for writing as well, so that it does not end with its first writer.
    with os.fdopen(os.open(FIFO, os.O_RDWR)) as lines:
        for line in lines:
            folder, shell = line.split()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _wait_for_program(Path(folder), shell)


def _wait_for_program(folder: Path, shell: str) -> NoReturn:
    environment = dict(
        variable.split("=", 1) for variable in _texts(folder / "environment")
    )
    named = environment.pop(PID, "")
    program = os.fork()
    if program == 0:
        _run(environment, _texts(folder / "arguments"), shell)
    if named:
        Path(named).write_text(str(program))
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    (folder / "ended").write_text(f"{code if code >= 0 else 128 - code}\n")
    sys.exit(0)


def _run(environment: dict[str, str], arguments: list[str], shell: str) -> NoReturn:
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        output = os.open(f"/proc/{shell}/fd/{number}", os.O_WRONLY | os.O_APPEND)
        os.dup2(output, number)
    sys.argv = arguments
    sys.exit(importlib.import_module(arguments[0]).main())


def _texts(path: Path) -> list[str]:
    return path.read_text(errors="surrogateescape").split("\0")[:-1]


if __name__ == "__main__":
    main()
