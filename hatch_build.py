"""Compiles the loop over the pieces of a copy, where there is a compiler.

Without one the wheel is pure Python, which does the same: see kvwire/memory/pieces.py.
The library knows nothing of Python, so one wheel is for all versions of a platform.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCE = "kvwire/memory/_copy.c"
_LIBRARY = "kvwire/memory/_copy.so"


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the library beside its source, and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it; a failure is told, and leaves a wheel of Python alone."""
        library = Path(self.root, _LIBRARY)
        library.unlink(missing_ok=True)  # somebody may run with it
        # As Python was compiled; a compiler that is named in CC comes first.
        named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
        source = Path(self.root, _SOURCE)
        compiler = [*shlex.split(named), "-O2", "-fPIC", "-shared", "-o", str(library)]
        # See kvwire/memory/compiled.py, which compares it.
        stamp = f"-DKVWIRE_SOURCE={zlib.crc32(source.read_bytes())}u"
        try:
            subprocess.run([*compiler, stamp, str(source)], check=True, text=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            self.app.display_warning(f"kvwire is built without {_SOURCE}: {exc}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = _LIBRARY
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
