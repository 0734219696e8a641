"""What building kvwire does beside packing files.

Compiles the loop over the pieces of a copy, where there is a compiler. Without one the
wheel is pure Python, which does the same: see kvwire/memory/pieces.py. The library
knows nothing of Python, so one wheel is for all versions of a platform.

Writes the addresses of the repository that KVWIRE_REPOSITORY names into the metadata,
as the workflow of a release does; there are none in other builds.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_SOURCE = "kvwire/memory/_copy.c"
_LIBRARY = "kvwire/memory/_copy.so"
# Links of README.md to files of the tree, and its pictures; not to other addresses, nor
# to its own headings.
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)")


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the library beside its source, and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it; a failure is told, and leaves a wheel of Python alone."""
        if version == "editable":
            library = Path(self.root, _LIBRARY)
            library.unlink(missing_ok=True)  # somebody may run with it
        else:
            # Not into the tree, which may be installed itself, for another machine.
            self._folder = tempfile.TemporaryDirectory()
            library = Path(self._folder.name, "_copy.so")
        # As Python was compiled; a compiler that is named in CC comes first.
        named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
        source = Path(self.root, _SOURCE)
        compiler = [*shlex.split(named), *_architectures(), "-O2", "-fPIC", "-shared"]
        # See kvwire/memory/compiled.py, which compares it.
        stamp = f"-DKVWIRE_SOURCE={zlib.crc32(source.read_bytes())}u"
        try:
            subprocess.run(
                [*compiler, "-o", str(library), stamp, str(source)],
                check=True,
                text=True,
            )
        except (OSError, subprocess.CalledProcessError) as exc:
            self.app.display_warning(f"kvwire is built without {_SOURCE}: {exc}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = _LIBRARY
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, _: dict[str, Any], __: str) -> None:
        """Remove what the wheel has a copy of."""
        if version != "editable":
            self._folder.cleanup()


def _architectures() -> list[str]:
    """Return the arguments for a Mac's compiler, which can make one file for two."""
    named = os.environ.get("ARCHFLAGS")
    if named is None and sysconfig.get_platform().endswith("universal2"):
        named = "-arch arm64 -arch x86_64"
    return shlex.split(named or "")


class AddressesHook(MetadataHookInterface):
    """Sets `project.urls`, and leads the links of README.md to the repository.

    A package index shows README.md without the files beside it.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what pyproject.toml calls dynamic."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        repository = os.environ.get("KVWIRE_REPOSITORY", "").rstrip("/")
        if repository:
            tag = f"v{metadata['version']}"
            metadata["urls"] = {
                "Documentation": f"{repository}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Source": repository,
                "Issues": f"{repository}/issues",
            }

            def lead(found: re.Match[str]) -> str:
                kind = "raw" if found[1] else "blob"
                return f"{found[1]}{found[2]}({repository}/{kind}/{tag}/{found[3]})"

            text = _LINK.sub(lead, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
