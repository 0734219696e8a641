"""``kvwire keygen``: a new key file."""

from __future__ import annotations

from pathlib import Path


def keygen(file: Path, /) -> None:
    """Make a key of 32 random bytes in a new file that only you can read.

    Copy the file to every peer by a secure way. The command never
    shows the key, and never overwrites an existing file.

    Args:
        file: Where to write it.
    """
    from kvwire.security.keys import write_key_file  # noqa: PLC0415 - not for `kvwire --help`

    write_key_file(file)
    print(f"{file}: a new key, mode 0600. In kvwire.toml, on both sides:\n")
    print('trust = "psk"')
    print(f'psk_file = "{file.resolve()}"')
