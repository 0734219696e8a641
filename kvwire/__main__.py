"""``python -m kvwire`` is the ``kvwire`` command."""

import signal
import sys


def run() -> None:
    """Run the command, and end the process with its exit status."""
    # Ctrl-C while modules are imported, or at the end, ends the process and shows no
    # traceback. A process that was started to ignore it still does.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvwire.cli.console import prepare_output  # noqa: PLC0415
    from kvwire.cli.main import main  # noqa: PLC0415 - after that

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare_output()
    status = main()
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    run()
