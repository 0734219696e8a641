"""What `import kvwire` loads; pyproject.toml says who may import whom."""

from __future__ import annotations

import subprocess
import sys


def test_import_kvwire_loads_no_transport_and_no_heavy_library() -> None:
    """A library pays for what it uses: backends, torch and the CLI come when asked."""
    code = "import sys, kvwire; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "kvwire" in loaded
    backends = {module for module in loaded if module.startswith("kvwire_")}
    heavy = loaded & {"torch", "cupy", "pytest", "rich", "cyclopts", "kvwire.testing"}
    assert not backends | heavy
