"""One side of a benchmark as a process of its own: ``SIDE [DESCRIPTOR]``."""

from __future__ import annotations

import signal
import socket
import sys

from kvwire.cli.bench.side import main

# Ctrl-C reaches every process of a terminal; this one ends when its sockets close.
signal.signal(signal.SIGINT, signal.SIG_IGN)
text, *descriptors = sys.argv[1:]
others = [socket.socket(fileno=int(number)) for number in descriptors]
main(text, socket.socket(fileno=0), others[0] if others else None)
