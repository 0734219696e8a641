"""``PYTHON path/to/peers PROGRAM [KEY=VALUE ...]``: one side of one peer.

This folder is loaded as a package of its own name, without kvwire around it, and is
taken off ``sys.path``: a program named like its peer would hide it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "kvwire_bench_peers"


def main() -> None:
    """Load the package, then run the program."""
    program, *pairs = sys.argv[1:]
    here = Path(__file__).resolve().parent
    del sys.path[0]  # this folder, since this file was started by its path
    spec = importlib.util.spec_from_file_location(
        NAME, here / "__init__.py", submodule_search_locations=[str(here)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)
    serving = importlib.import_module(f"{NAME}.serving")
    chosen = importlib.import_module(f"{NAME}.{program}")
    serving.serve(chosen.Program, dict(pair.split("=", 1) for pair in pairs))


if __name__ == "__main__":
    main()
