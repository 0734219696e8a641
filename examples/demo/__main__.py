"""``python examples/demo``: the command, or one of the processes that it starts."""

import signal
import sys
from pathlib import Path


def run() -> None:
    """Run the part that the command line names, and exit with its status."""
    # Ctrl-C while modules are imported, or at the end, ends the process and shows no
    # traceback. In a role process it always does: there Ctrl-C is meant for the process
    # that started it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Python has put this folder there, but the package is found in the folder above.
    sys.path[0] = str(Path(__file__).parents[1])
    if sys.argv[1:2] == ["role"]:
        from demo.roles import play  # noqa: PLC0415 - after that

        sys.exit(play(*sys.argv[2:]))
    from demo.command import app  # noqa: PLC0415
    from kvwire.cli.main import main  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main(command=app)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    run()
