"""Programs that a test runs to their end, and looks at what they print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# What they take at most, on a machine that is busy with something else.
ENDS_WITHIN_S = 300.0


def ran(
    *command: str | Path,
    check: bool = False,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = ENDS_WITHIN_S,
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with all that it has printed."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=check,
        cwd=cwd,
        env=env,
        timeout=timeout,
    )


def python(
    *arguments: str | Path,
    check: bool = False,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = ENDS_WITHIN_S,
) -> subprocess.CompletedProcess[str]:
    """The same of a process of this Python."""
    command = (sys.executable, *arguments)
    return ran(*command, check=check, cwd=cwd, env=env, timeout=timeout)
