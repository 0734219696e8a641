"""Who imports whom: the tree against a table, and what `import kvwire` loads.

The table is the architecture. A package imports the ones it names and nothing else of
kvwire; a backend sees the contract only; the core sees neither loop nor clock.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

import pytest

from tests.support.tree import Source, python

# What the pure layers may use of the standard library: data, arithmetic, digests.
_DATA_MODULES = {
    *("abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools"),
    *("hashlib", "heapq", "hmac", "itertools", "math", "operator", "re", "string"),
    *("struct", "types", "typing", "urllib.parse", "zlib"),
}
_BASE = {"kvwire.errors", "kvwire.limits", "kvwire.types"}
_PUBLIC = {
    *(*_BASE, "kvwire", "kvwire.config", "kvwire.extras", "kvwire.kv", "kvwire.memory"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One row: which modules it covers and what they may import.

    Attributes:
        covers: Modules, with all that lies below them.
        kvwire: Modules of kvwire it may import, besides itself; ``None`` means all.
        others: Third-party packages it may import.
        stdlib: Modules of the standard library it may import; ``None`` means all.
        never: What it may not import although the lines above would allow it.
    """

    covers: tuple[str, ...]
    kvwire: set[str] | None
    others: set[str]
    stdlib: set[str] | None = None
    never: frozenset[str] = frozenset()


# The first row that covers a module holds.
TABLE = (
    Layer(
        covers=("kvwire.errors", "kvwire.limits", "kvwire.types"),
        kvwire=_BASE,
        others=set(),
        stdlib=_DATA_MODULES,
    ),
    # Reads what pip has noted of the installation.
    Layer(covers=("kvwire.extras",), kvwire=set(), others=set()),
    Layer(
        covers=("kvwire.unreadable",),
        kvwire=set(),
        others={"msgspec"},
        stdlib=_DATA_MODULES,
    ),
    Layer(
        covers=("kvwire.wire",),
        kvwire={*_BASE, "kvwire.unreadable"},
        others={"msgspec"},
        stdlib=_DATA_MODULES,
    ),
    Layer(
        covers=("kvwire.proto",),
        kvwire={*_BASE, "kvwire.wire"},
        others={"msgspec"},
        stdlib=_DATA_MODULES,
    ),
    Layer(
        # Reads the C struct behind an array of another library.
        covers=("kvwire.kv.dlpack",),
        kvwire=_BASE,
        others=set(),
        stdlib={*_DATA_MODULES, "ctypes"},
    ),
    Layer(
        covers=("kvwire.kv",),
        kvwire=_BASE,
        others={"numpy"},
        stdlib=_DATA_MODULES,
    ),
    Layer(
        covers=("kvwire.memory.cuda",),
        kvwire={*_BASE, "kvwire.kv", "kvwire.memory"},
        others={"numpy", "torch", "cupy"},
        never=frozenset({"asyncio"}),
    ),
    Layer(
        covers=("kvwire.memory",),
        kvwire={*_BASE, "kvwire.extras", "kvwire.kv"},
        others={"numpy", "xxhash"},
        never=frozenset({"asyncio"}),
    ),
    Layer(covers=("kvwire.config",), kvwire=_BASE, others={"msgspec"}),
    Layer(
        covers=(
            *("kvwire.backend", "kvwire.lane", "kvwire.registry", "kvwire.selection"),
        ),
        # Each other; the contract's Payload is kv's Fragments; wishes are configured.
        kvwire={
            *(*_BASE, "kvwire.config", "kvwire.memory", "kvwire.kv.fragments"),
            *("kvwire.backend", "kvwire.lane", "kvwire.registry", "kvwire.selection"),
            # What a link proves is part of the contract.
            "kvwire.tls",
        },
        others=set(),
    ),
    Layer(
        covers=("kvwire.store", "kvwire.observe"),
        # A store server that is gone is dialled again; what fails at once lets the loop
        # run; a damaged file is read as bytes of a stranger.
        kvwire={*_PUBLIC, "kvwire.backoff", "kvwire.fairness", "kvwire.unreadable"},
        others={
            "msgspec",
            "numpy",
            "obstore",
            "opentelemetry",
            "prometheus_client",
            "xxhash",
        },
    ),
    Layer(
        covers=("kvwire.integrations",),
        kvwire={*_PUBLIC, "kvwire.unreadable"},
        others={
            *("httpx", "msgspec", "numpy", "starlette", "uvicorn"),
            *("prometheus_client", "torch", "transformers", "vllm"),
        },
    ),
    # Programs for interpreters that need not have kvwire.
    Layer(
        covers=("kvwire.cli.bench.peers",),
        kvwire=set(),
        others={"mooncake", "nixl_cu12", "numpy", "torch", "ucxx"},
    ),
    # Plays engine, with NumPy or transformers, over a proxy that is as slow as asked.
    Layer(
        covers=("kvwire.cli.demo",),
        kvwire={
            *(*_PUBLIC, "kvwire.cli.plot", "kvwire.integrations"),
            *("kvwire.testing.proxy", "kvwire.testing.toxics"),
        },
        others={
            *("cyclopts", "matplotlib", "msgspec", "numpy", "rich"),
            *("torch", "transformers"),
        },
    ),
    Layer(
        covers=("kvwire.cli", "kvwire.__main__"),
        kvwire={
            *(*_PUBLIC, "kvwire.observe", "kvwire.store"),
            # keygen writes the files that trust reads; doctors read certificates.
            *("kvwire.trust", "kvwire.tls"),
            # The doctor asks every backend what it finds.
            *("kvwire.backend", "kvwire.registry"),
        },
        # The benchmark's processes run on a loop of their choice; doctors speak JSON.
        # matplotlib draws pictures, when one is asked for.
        others={"cyclopts", "matplotlib", "msgspec", "numpy", "rich", "uvloop"},
    ),
    Layer(
        covers=("kvwire.testing.pytest_plugin",),
        kvwire=None,
        others={"numpy", "pytest", "pytest_asyncio"},
    ),
    Layer(
        covers=("kvwire.testing",),
        kvwire=None,
        # Commands print tables; fault plans live with the backend that carries them.
        others={"kvwire_inproc", "numpy", "rich", "uvloop"},
    ),
    # The front: communicator, connection, request, transfer, engine, config, ...
    Layer(
        covers=("kvwire",),
        kvwire=None,
        others={"msgspec", "numpy", "uvloop"},
        never=frozenset({"kvwire.testing", "kvwire.cli", "kvwire.integrations"}),
    ),
    *(
        Layer(
            covers=(backend,),
            kvwire={
                *(*_BASE, "kvwire.backend", "kvwire.lane"),
                *("kvwire.extras", "kvwire.tls", "kvwire.tls_errors"),
                *("kvwire.memory", "kvwire.kv.fragments"),
            },
            others={"numpy", *own},
        )
        for backend, own in {
            "kvwire_inproc": (),
            "kvwire_local": (),
            "kvwire_nccl": ("cuda", "nccl", "torch"),
            "kvwire_tcp": ("uvloop",),
            "kvwire_ucx": (),
        }.items()
    ),
)


def _module(source: Source) -> str:
    path = PurePosixPath(source.path.removeprefix("backends/")).with_suffix("")
    parts = path.parts[:-1] if path.name == "__init__" else path.parts
    return ".".join(parts)


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    """The line and full name of every module imported, lazily or for types included."""
    package = _module(source)
    if not source.path.endswith("__init__.py"):
        package = package.rpartition(".")[0]
    for node in ast.walk(source.syntax):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = parents[: len(parents) + 1 - node.level]
                base = ".".join([*above, base]).rstrip(".")
            # `from kvwire import limits` names a module, `import Grant` a thing in one.
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in _modules() else base


@lru_cache(maxsize=1)
def _modules() -> set[str]:
    """Asked for each import there is."""
    return {_module(source) for source in python("kvwire/", "backends/")}


def _is_below(
    module: str, parents: set[str] | frozenset[str] | tuple[str, ...]
) -> bool:
    return any(
        module == parent or module.startswith(f"{parent}.") for parent in parents
    )


def _layer(module: str) -> Layer | None:
    return next((layer for layer in TABLE if _is_below(module, layer.covers)), None)


def _allows(layer: Layer, module: str) -> bool:
    top = module.partition(".")[0]
    if _is_below(module, layer.never):
        return False
    if top == "__future__" or _is_below(module, layer.covers):
        return True
    if top == "kvwire":
        return layer.kvwire is None or _is_named(module, layer.kvwire)
    if top in sys.stdlib_module_names:
        return layer.stdlib is None or _is_below(module, layer.stdlib)
    return top in layer.others


def _is_named(module: str, allowed: set[str]) -> bool:
    """As below, but ``kvwire`` stands for its public names, not for all in it."""
    return module in allowed or _is_below(module, allowed - {"kvwire"})


def violations(source: Source) -> Iterator[str]:
    """Each import of one file that its row does not allow."""
    importer = _module(source)
    layer = _layer(importer)
    if layer is None:
        yield f"{source.path}: no row of the table covers {importer}"
        return
    for line, module in _imports(source):
        if not _allows(layer, module):
            yield f"{source.path}:{line}: {importer} imports {module}"


def test_the_tree_keeps_the_table() -> None:
    """Every import of kvwire and its backends is one its row allows."""
    files = python("kvwire/", "backends/")
    assert len(files) > 10
    found = [line for source in files for line in violations(source)]
    if found:
        pytest.fail("\n  ".join(["imports across layers:", *found]), pytrace=False)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kvwire/types.py", "import kvwire.backend"),
        ("kvwire/limits.py", "import socket"),
        ("kvwire/wire/header.py", "import asyncio"),
        ("kvwire/wire/header.py", "def f():\n    import time"),
        ("kvwire/wire/header.py", "import numpy"),
        ("kvwire/wire/header.py", "from kvwire.proto import state"),
        ("kvwire/proto/state.py", "from ..memory import buffers"),
        ("kvwire/proto/state.py", "from kvwire import connection"),
        ("kvwire/proto/state.py", "import os.path"),
        ("kvwire/kv/spec.py", "import torch"),
        ("kvwire/kv/spec.py", "from kvwire.proto.state import State"),
        ("kvwire/memory/copy.py", "import torch"),
        ("kvwire/memory/cuda.py", "import asyncio"),
        ("kvwire/registry.py", "import kvwire_tcp"),
        ("kvwire/backend.py", "from kvwire.proto.state import State"),
        ("kvwire/communicator.py", "def f():\n    import kvwire_tcp"),
        ("kvwire/communicator.py", "import torch"),
        ("kvwire/communicator.py", "from kvwire.testing import pair"),
        ("kvwire/store/index.py", "from kvwire.proto.state import State"),
        ("kvwire/cli/main.py", "from kvwire import communicator"),
        ("kvwire/testing/pair.py", "import pytest"),
        ("backends/kvwire_tcp/link.py", "from kvwire.proto.state import State"),
        ("backends/kvwire_tcp/link.py", "from kvwire.wire import header"),
        ("backends/kvwire_tcp/link.py", "import kvwire_inproc"),
        ("backends/kvwire_tcp/link.py", "import kvwire"),
        ("backends/kvwire_new/link.py", "x = 1"),
    ],
)
def test_a_wrong_import_is_found(
    path: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One example for each thing the table forbids."""
    known = {"kvwire.connection", "kvwire.communicator", "kvwire.proto.state"}
    known |= {"kvwire.memory.buffers", "kvwire.wire.header", "kvwire.testing.pair"}
    monkeypatch.setattr(f"{__name__}._modules", lambda: known)
    assert list(violations(Source(path, text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kvwire/types.py", "from kvwire.errors import UsageError"),
        ("kvwire/wire/header.py", "import zlib\nfrom kvwire import limits"),
        ("kvwire/proto/state.py", "from . import other\nfrom ..wire import header"),
        ("kvwire/memory/cuda.py", "def f():\n    import torch"),
        ("kvwire/connection.py", "from kvwire.proto import state\nimport asyncio"),
        ("kvwire/cli/main.py", "import kvwire\nfrom kvwire import Config"),
        ("kvwire/testing/pytest_plugin.py", "import pytest"),
        ("backends/kvwire_tcp/link.py", "import asyncio\nimport kvwire.backend"),
    ],
)
def test_a_right_import_is_not(path: str, text: str) -> None:
    """The other direction: what the rows allow passes."""
    assert list(violations(Source(path, text))) == []


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
