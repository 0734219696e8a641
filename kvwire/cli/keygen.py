"""``kvwire keygen``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console


def keygen(file: Path, /) -> None:
    """Make a key of 32 random bytes in a new file that only you can read.

    Copy the file to every peer, by a way you trust with secrets. The key itself is
    never shown, and a file that exists is never overwritten.

    Args:
        file: Where to write it.
    """
    from kvwire.security.keys import write_key_file  # noqa: PLC0415 - not for `kvwire --help`

    write_key_file(file)
    # Not wrapped and not coloured: the three lines are there to be copied.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{file}: a new key, mode 0600. In kvwire.toml, on both sides:\n")
    console.print('trust = "psk"')
    console.print(f'psk_file = "{file.resolve()}"')
