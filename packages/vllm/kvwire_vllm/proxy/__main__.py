"""``python -m kvwire_vllm.proxy`` runs the proxy."""

import signal
import sys


def run() -> None:
    """Run the proxy, and end the process with its exit status."""
    # During imports, Ctrl-C ends the process without a traceback. While the proxy
    # serves, Ctrl-C stops it gracefully. If the process was started to ignore Ctrl-C,
    # it keeps ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvwire.observe.output import prepare_output  # noqa: PLC0415
    from kvwire_vllm.proxy.command import main  # noqa: PLC0415

    prepare_output()
    sys.exit(main())


if __name__ == "__main__":
    run()
