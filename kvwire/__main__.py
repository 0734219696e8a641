"""``python -m kvwire`` is the ``kvwire`` command."""

import io
import os
import signal
import sys


def run() -> None:
    """Run the command, and end the process with its exit status."""
    # Ctrl-C while modules are imported, or at the end, ends the process and shows no
    # traceback. A process that was started to ignore it still does.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvwire.cli.main import main  # noqa: PLC0415 - after that

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _prepare_output()
    status = main()
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


def _prepare_output() -> None:
    """Make the output take whatever is printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by `>&-`
            unread = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(unread, "w", closefd=False))
    # A name may have a character that the locale's encoding has not.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    run()
