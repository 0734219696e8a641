"""Words that must not occur: what runs a peer's bytes, what ties us to one machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.house.check import Check, Finding, dotted, each, imported
from tests.support.tree import Source

# --- code-executing deserialisers (goal S1) -------------------------------------------

EXECUTING_MODULES = {
    *("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"),
    *("joblib", "jsonpickle"),
}
EXECUTING_NAMES = {"eval", "exec", "__import__"}
EXECUTING_CALLS = {
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "torch.load"),
    *("np.load", "numpy.load"),
}
# numpy.load is harmless as long as nothing says the opposite.
_NUMPY_LOADS = {"np.load", "numpy.load"}
_IN_TEXT = re.compile(
    rf"\b(?:import|from)\s+(?:{'|'.join(sorted(EXECUTING_MODULES))})\b"
    rf"|\b(?:{'|'.join(sorted(EXECUTING_MODULES))})[.:]\w"
    r"|(?<![\w.])(?:eval|exec)\("
    r"|\b(?:yaml\.(?:unsafe_|full_)?load|torch\.load)\("
    r"|allow_pickle\s*=\s*[Tt]rue"
)
_FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def deserialisers(source: Source) -> Iterator[Finding]:
    """Anything that runs code from data, in code, docstrings, examples and settings."""
    if source.path.endswith(".py"):
        yield from _in_code(source)
    elif source.path.endswith(".md"):
        for block in _FENCE.finditer(source.text):
            yield from _in_text(source, block.start(1), block[1])
    else:
        yield from _in_text(source, 0, source.text)


def _in_code(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.syntax):
        for word in _executing(node):
            yield Finding(source.path, getattr(node, "lineno", 0), word, "runs data")
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words = _IN_TEXT.findall(str(node.value.value))
            for word in words:
                yield Finding(source.path, node.lineno, word, "taught in a docstring")


def _executing(node: ast.AST) -> Iterator[str]:
    for module in imported(node):
        if module.partition(".")[0] in EXECUTING_MODULES:
            yield module
    if isinstance(node, ast.Name) and node.id in EXECUTING_NAMES:
        yield node.id
    if isinstance(node, ast.Call):
        called = dotted(node.func)
        first = node.args[0] if node.args else None
        if called in EXECUTING_CALLS - _NUMPY_LOADS:
            yield called
        if called in _NUMPY_LOADS and "allow_pickle" in {k.arg for k in node.keywords}:
            yield called
        if (
            called.endswith("import_module")
            and isinstance(first, ast.Constant)
            and first.value in EXECUTING_MODULES
        ):
            yield str(first.value)


def _in_text(source: Source, start: int, text: str) -> Iterator[Finding]:
    for match in _IN_TEXT.finditer(text):
        line = source.text.count("\n", 0, start + match.start()) + 1
        yield Finding(source.path, line, match[0], "runs data")


# --- clocks and chance in the pure core -----------------------------------------------

_IMPURE = {"time", "datetime", "random", "secrets", "uuid"}


def clocks(source: Source) -> Iterator[Finding]:
    """Time and random numbers are inputs of the core: it takes neither by itself."""
    for node in ast.walk(source.syntax):
        for module in imported(node):
            if module.partition(".")[0] in _IMPURE:
                yield Finding(source.path, _line(node), module, "is an input, not ours")
        if isinstance(node, ast.Attribute) and dotted(node) == "os.urandom":
            yield Finding(
                source.path, node.lineno, "os.urandom", "is an input, not ours"
            )


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


# --- ties to one machine or one package registry --------------------------------------

_MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|Users|home)/[\w.][\w.-]*")
_REGISTRY = re.compile(
    r"(?:pypi\.org|pythonhosted\.org|npmjs\.org|anaconda\.org|proxy\.golang\.org)"
)


def machine_paths(source: Source) -> Iterator[Finding]:
    """A path that exists on one machine only."""
    yield from _matches(source, _MACHINE_PATH, "exists on one machine")


def registry_hosts(source: Source) -> Iterator[Finding]:
    """Which registry pip asks is the user's setting, not ours."""
    yield from _matches(source, _REGISTRY, "let pip's own settings choose")


def _matches(source: Source, what: re.Pattern[str], why: str) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, 1):
        for match in what.finditer(line):
            yield Finding(source.path, number, match[0], why)


_EVERYWHERE = ("",)
_ANY_TEXT = (".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".svg", "Makefile", "run")

CHECKS = (
    Check(
        name="no deserialiser that runs code",
        over=_EVERYWHERE,
        suffixes=(".py", ".md", ".toml"),
        find=each(deserialisers),
        bad=[
            ("a.py", "import pickle"),
            ("a.py", "from marshal import loads"),
            ("a.py", "def f(x):\n    return eval(x)"),
            ("a.py", "f = exec"),
            ("a.py", "x = torch.load(path)"),
            ("a.py", "x = yaml.load(text)"),
            ("a.py", "x = np.load(path, allow_pickle=True)"),
            ("a.py", "x = importlib.import_module('dill')"),
            ("a.py", 'def f():\n    """Use ``pickle.loads(data)``."""'),
            ("a.md", "Text.\n\n```python\ndata = pickle.loads(raw)\n```\n"),
            ("a.md", "1. Item\n\n   ```sh\n   python -c 'exec(code)'\n   ```\n"),
            ("a.toml", 'codec = "cloudpickle:loads"'),
        ],
        good=[
            ("a.py", "model.eval()\nre.compile('x')\nnp.load(path)\nyaml.safe_load(x)"),
            ("a.py", 'def f():\n    """Never uses pickle."""'),
            (
                "a.md",
                "kvwire has no pickle.loads(...) in it.\n\n```sh\nmake test\n```\n",
            ),
            ("a.toml", 'keywords = ["no-pickle"]'),
        ],
    ),
    Check(
        name="no clock and no chance in the core",
        over=("kvwire/wire/", "kvwire/proto/"),
        find=each(clocks),
        bad=[
            ("kvwire/wire/a.py", "import time"),
            ("kvwire/wire/a.py", "from random import randbytes"),
            ("kvwire/wire/a.py", "def f():\n    from secrets import token_bytes"),
            ("kvwire/wire/a.py", "import os\nnonce = os.urandom(32)"),
        ],
        good=[("kvwire/wire/a.py", "def f(now: float) -> float:\n    return now")],
    ),
    Check(
        name="no path of one machine",
        over=_EVERYWHERE,
        suffixes=_ANY_TEXT,
        find=each(machine_paths),
        bad=[("a.md", f"see {'/'}root/.cache"), ("run", f"cd {'/'}work/main")],
        good=[("a.md", "see docs/work/plan.md, ~/work/a and https://x.org/work/b")],
    ),
    Check(
        name="no registry host",
        over=_EVERYWHERE,
        suffixes=_ANY_TEXT,
        find=each(registry_hosts),
        bad=[("Makefile", f"pip install -i https://{'pypi'}.org/simple kvwire")],
        good=[("README.md", "pip install kvwire, once it is on PyPI")],
    ),
)
