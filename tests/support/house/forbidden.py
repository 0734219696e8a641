"""Words that must not occur: what runs a peer's bytes, what ties us to one machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.house.check import Check, Find, Finding, each
from tests.support.tree import CODE, Source

# --- code-executing deserialisers (goal S1) -------------------------------------------

_MODULES = "pickle|_pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib|jsonpickle"
_EXECUTING = re.compile(
    rf"\b(?:import|from)\s+(?:{_MODULES})\b"
    rf"|\b(?:{_MODULES})[.:]\w"
    rf"|import_module\(['\"](?:{_MODULES})"
    r"|(?<![\w.])(?:eval|exec|__import__)\("
    r"|=\s*(?:eval|exec)\b(?!\w)"
    r"|\b(?:yaml\.(?:unsafe_|full_)?load|torch\.load)\("
    r"|allow_pickle\s*=\s*[Tt]rue"
)
_FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def deserialisers(source: Source) -> Iterator[Finding]:
    """Anything that runs code from data, in code, docstrings, examples and settings."""
    blocks = [(0, source.text)]
    if source.path.endswith(".md"):
        blocks = [(b.start(1), b[1]) for b in _FENCE.finditer(source.text)]
    for start, text in blocks:
        for match in _EXECUTING.finditer(text):
            line = source.text.count("\n", 0, start + match.start()) + 1
            yield Finding(source.path, line, match[0], "runs data")


# --- tasks that an application's task factory would start at once --------------------

_STARTS = re.compile(r"(?:\basyncio|loop(?:\(\))?)\.create_task\(")


def ownerless(source: Source) -> Iterator[Finding]:
    """Coroutines that go on alone once another one of them has raised."""
    for node in ast.walk(source.syntax):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name("asyncio"), attr="gather"),
                keywords=keywords,
            ) if all(one.arg != "return_exceptions" for one in keywords):
                text = "aio.gather_all(...) waits for all of them before it raises"
                yield Finding(source.path, node.lineno, "gather", text)


# --- types whose plan msgspec would build in several threads at once ------------------

_IN_A_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def plans(source: Source) -> Iterator[Finding]:
    """Decoders that a function makes, and conversions, which have none."""
    for function in ast.walk(source.syntax):
        if isinstance(function, _IN_A_FUNCTION):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and _plans(node):
                    text = (
                        "threads may meet a type half built: use a decoder of the "
                        "module, or kvwire.config.converted"
                    )
                    name = getattr(function, "name", "lambda")
                    yield Finding(source.path, node.lineno, name, text)


def _plans(call: ast.Call) -> bool:
    match call:
        case ast.Call(func=ast.Attribute(attr="Decoder")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name("msgspec"), attr="convert")):
            return True
        case ast.Call(func=ast.Attribute(attr="decode"), keywords=keywords):
            return any(keyword.arg == "type" for keyword in keywords)
    return False


# --- ties to one machine or one package registry --------------------------------------

_MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|Users|home)/[\w.][\w.-]*")
_REGISTRY = re.compile(
    r"(?:pypi\.org|pythonhosted\.org|npmjs\.org|anaconda\.org|proxy\.golang\.org)"
)


def _matches(what: re.Pattern[str], why: str) -> Find:
    def find(source: Source) -> Iterator[Finding]:
        for number, line in enumerate(source.lines, 1):
            for match in what.finditer(line):
                yield Finding(source.path, number, match[0], why)

    return each(find)


_EVERYWHERE = ("",)
_ANY_TEXT = (".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".svg", "Makefile", "run")

CHECKS = (
    Check(
        name="no deserialiser that runs code",
        over=_EVERYWHERE,
        # What forbids these words names them.
        beyond=("tests/support/house/",),
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
        excused={
            "tests/programs/fuzz/guard.py::pickle.f": "it names the audit event of "
            "what must not happen",
        },
    ),
    Check(
        name="tasks begin later",
        over=CODE,
        suffixes=(".py",),
        find=_matches(
            _STARTS,
            "aio.start_task(...) begins later under eager task factories too "
            "(asyncio.Task(..., loop=...) in a backend)",
        ),
        bad=[
            ("kvwire/a.py", "task = asyncio.create_task(work())"),
            ("kvwire/a.py", "asyncio.get_running_loop().create_task(work())"),
            ("kvwire/a.py", "self._loop.create_task(work())"),
        ],
        good=[("kvwire/a.py", "group.create_task(work())\nstart_task(work())")],
    ),
    Check(
        name="no coroutine goes on without an owner",
        over=CODE,
        find=each(ownerless),
        bad=[("kvwire/a.py", "async def f():\n    await asyncio.gather(*map(g, x))")],
        good=[
            ("kvwire/a.py", "async def f():\n    await gather_all(*map(g, x))"),
            (
                "kvwire/a.py",
                "async def f():\n    await asyncio.gather(*x, return_exceptions=True)",
            ),
        ],
        excused={
            "kvwire/transfers/incoming.py::gather": "it cancels the rest, and waits",
            "packages/certify/kvwire_certify/player.py::gather": "its process ends "
            "after an error",
            "packages/certify/kvwire_certify/targets/kvwire.py::gather": "an accept "
            "without a connect never ends; closing the communicator ends it",
        },
    ),
    Check(
        name="decoders are built at import",
        over=CODE,
        # Their processes decode in one thread each.
        beyond=("packages/certify/", "packages/vllm/kvwire_vllm/proxy/"),
        suffixes=(".py",),
        find=each(plans),
        bad=[
            ("kvwire/a.py", "def f(x):\n    return msgspec.convert(x, Kind)"),
            ("kvwire/a.py", "async def f(x):\n    msgspec.json.decode(x, type=Kind)"),
            ("kvwire/a.py", "def f():\n    return msgspec.json.Decoder(Kind)"),
        ],
        good=[("kvwire/a.py", "_KIND: Final = msgspec.json.Decoder(Kind)")],
        excused={
            "kvwire/config.py::converted": "all conversions take its lock",
        },
    ),
    Check(
        name="no path of one machine",
        over=_EVERYWHERE,
        suffixes=_ANY_TEXT,
        find=_matches(_MACHINE_PATH, "exists on one machine"),
        bad=[("a.md", f"see {'/'}root/.cache"), ("run", f"cd {'/'}work/main")],
        good=[("a.md", "see docs/work/plan.md, ~/work/a and https://x.org/work/b")],
    ),
    Check(
        name="no registry host",
        over=_EVERYWHERE,
        suffixes=_ANY_TEXT,
        find=_matches(_REGISTRY, "let pip's own settings choose"),
        bad=[("Makefile", f"pip install -i https://{'pypi'}.org/simple kvwire")],
        good=[("README.md", "pip install kvwire, once it is on PyPI")],
    ),
)
