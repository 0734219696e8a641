"""The ``kvwire`` command: its subcommands, and the output of their errors.

A subcommand that needs many modules is imported only when it is called; other
distributions add theirs by entry points. kvwire's errors, missing packages and the
system's errors are each printed as one line with a remedy. The exit status is then 2 if
the command was called wrong, and 1 otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from cyclopts import (
    App,
    CycloptsError,
    Parameter,
    UnknownCommandError,
    UnusedCliTokensError,
)

import kvwire
from kvwire.cli import logs
from kvwire.cli.keygen import keygen
from kvwire.cli.plug_ins import GROUP, Commands
from kvwire.errors import nearest

FAILED: Final = 1
CALLED_WRONG: Final = 2
# What shells report for a command that Ctrl-C has ended: 128 + SIGINT.
INTERRUPTED: Final = 130


def _default(value: Any) -> str | None:
    """Return a default as text for --help; nothing if it is None."""
    several = isinstance(value, tuple)
    return (" ".join(map(str, value)) if several else str(value)) if value else None


app: App = App(
    name="kvwire",
    help=f"Awaitable transport for LLM KV cache.\n\n{logs.HELP}",
    version=kvwire.__version__,
    version_flags=["--version", "-V"],
    # Ours to turn into an exit status.
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative="", show_default=_default),
)
app.command(keygen)
app.register_install_completion_command(
    "--install-completion",
    # A shell's own files, such as ~/.bashrc, are the user's to change.
    add_to_startup=False,
    help="Write completion of commands and options for this shell into a file.",
)
app.command(
    "kvwire.cli.config:app",
    name="config",
    help="Show every value of the configuration, and where it came from.",
)
app.command(
    "kvwire.cli.doctor.command:app",
    name="doctor",
    help="Check which transports can run here, which cannot, and the remedies.",
)
app.command(
    "kvwire.cli.directory:app",
    name="directory",
    help="List the members of a directory.",
)
app.command(
    "kvwire.cli.inspect:top",
    name="top",
    help=(
        "Show what is open in live processes, and what each transfer waits for.\n\n"
        "Only processes started with KVWIRE_INSPECT or the key `inspect` are shown."
    ),
)
app.command(
    "kvwire.cli.inspect:trace",
    name="trace",
    help="Write the last events of live processes as a file for ui.perfetto.dev.",
)
_commands = Commands(app, entry_points(group=GROUP))


def main(arguments: Sequence[str] | None = None, command: App | None = None) -> int:
    """Run a command line.

    Args:
        arguments: The arguments; ``sys.argv[1:]`` by default.
        command: The command; ``kvwire`` by default.

    Returns:
        The exit status.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    if tokens[:1] == ["help"]:  # like git and others
        tokens = [*tokens[1:], "--help"]
    try:
        tokens, level = logs.take_level(tokens)
        with logs.logging_from(level):
            if command is None and tokens:
                _commands.load(tokens[0])
            # A command with its own exit status returns it.
            status = (command or app)(
                tokens,
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
        print(end="", flush=True)  # output that cannot be written is an error too
    except CycloptsError as exc:
        print(f"kvwire: {_call_error(exc)}", file=sys.stderr)
        return CALLED_WRONG
    except kvwire.KVWireError as exc:
        print(f"kvwire: {exc}", file=sys.stderr)
        return CALLED_WRONG if isinstance(exc, kvwire.UsageError) else FAILED
    except BrokenPipeError:  # as in `kvwire ... | head`
        return _unread()
    except (ModuleNotFoundError, OSError) as exc:  # a missing extra, a full disk
        print(f"kvwire: {_error_line(exc)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status or 0


def _unread() -> int:
    """Silence the output after its reader is gone, and return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _call_error(exc: CycloptsError) -> str:
    if isinstance(exc, UnknownCommandError) and exc.unused_tokens and exc.app:
        given = exc.unused_tokens[0]
        if not given.startswith("-"):
            # The library's own text has no more than eight commands.
            known = (name for name in exc.app if not name.startswith("-"))
            return f"unknown command {given!r}; {nearest(given, known)}"
    if isinstance(exc, UnusedCliTokensError) and exc.unused_tokens:
        return f"unexpected argument: {' '.join(exc.unused_tokens)}"
    return str(exc).strip()


def _error_line(exc: ModuleNotFoundError | OSError) -> str:
    if isinstance(exc, ModuleNotFoundError) or not exc.strerror:
        return str(exc)
    return f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
