"""What vLLM's releases offer to connectors: names and signatures.

``packages/vllm/tests/interface.json`` has them for each release that kvwire
supports, and ``test_interface.py`` compares it with the vLLM that is installed and with
kvwire's own classes. Nothing of vLLM is imported, so its wheel suffices, also one for
machines that are not here::

    pip download --no-deps vllm==0.33.0
    python -m packages.vllm.tests.programs.interface vllm-0.33.0-*.whl

This prints every member that is new, gone or different since the release before, and
records it with ``--record``.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from pathlib import Path
from typing import Final

Members = dict[str, str]
"""The members of a class, each with its signature or value."""

Interface = dict[str, Members]
"""The members of each class of one release."""

RECORD: Final = Path(__file__).parents[1] / "interface.json"

_V1: Final = "distributed/kv_transfer/kv_connector/v1"
CLASSES: Final = {
    f"{_V1}/base.py": (
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorMetadata",
        "KVConnectorHandshakeMetadata",
        "KVConnectorWorkerMetadata",
        "KVConnectorTransferResults",
        "KVConnectorRole",
    ),
    f"{_V1}/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "distributed/kv_transfer/kv_connector/factory.py": ("KVConnectorFactory",),
    "distributed/kv_events.py": ("BlockStored", "BlockRemoved", "KVEventBatch"),
    "config/kv_transfer.py": ("KVTransferConfig",),
    "v1/outputs.py": ("KVConnectorOutput",),
    "v1/core/sched/output.py": (
        "NewRequestData",
        "CachedRequestData",
        "SchedulerOutput",
    ),
    "v1/kv_cache_interface.py": (
        "KVCacheSpec",
        "AttentionSpec",
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
        "KVCacheGroupSpec",
        "KVCacheConfig",
    ),
}


def minor(version: str) -> str:
    """Return a release's first two numbers, "0.32" of "0.32.1+cpu"."""
    return ".".join(version.split(".")[:2])


def interface_of(source: Path) -> tuple[str, Interface]:
    """Return a release, and what it offers; the source is a wheel or a folder."""
    found: Interface = {}
    for path, names in CLASSES.items():
        classes = classes_in(_text(source, f"vllm/{path}"))
        found |= {name: classes.get(name, {}) for name in names}
    version = re.search(
        r"^__version__ = (?:version = )?['\"]([^'\"]+)",
        _text(source, "vllm/_version.py"),
        re.MULTILINE,
    )
    if version is None:
        raise SystemExit(f"{source}: vllm/_version.py has no __version__")
    return minor(version[1]), found


def classes_in(text: str) -> dict[str, Members]:
    """Return the classes of a module's source, each with its members."""
    nodes = ast.parse(text).body
    return {
        node.name: dict(_members(node))
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }


def recorded() -> dict[str, Interface]:
    """Return what is recorded, by release, the oldest first."""
    record = json.loads(RECORD.read_text())
    classes = record["classes"]
    found: dict[str, Interface] = {
        release: {name: {} for name in classes} for release in record["releases"]
    }
    for name, members in classes.items():
        for member, texts in members.items():
            for text, releases in texts.items():
                for release in releases.split():
                    found[release][name][member] = text
    return found


def differences(before: Interface, after: Interface) -> list[str]:
    """Return a line for each member that is new, gone or different."""
    lines: list[str] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, {}), after.get(name, {})
        for member in sorted({*old, *new}):
            where = f"{name}.{member}"
            if member not in old:
                lines.append(f"new: {where} {new[member]}")
            elif member not in new:
                lines.append(f"gone: {where} {old[member]}")
            elif old[member] != new[member]:
                lines.append(f"different: {where} {old[member]} -> {new[member]}")
    return lines


def _text(source: Path, path: str) -> str:
    """Return a file of a wheel or a folder; "" where that release has no such file."""
    if source.is_dir():
        file = source / path
        return file.read_text() if file.is_file() else ""
    with zipfile.ZipFile(source) as wheel:
        return wheel.read(path).decode() if path in wheel.namelist() else ""


def _members(node: ast.ClassDef) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            if not one.name.startswith("_") or one.name == "__init__":
                found.append((one.name, _signature(one)))
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            value = f" = {ast.unparse(one.value)}" if one.value else ""
            kind = ast.unparse(_Unquoted().visit(one.annotation))
            found.append((one.target.id, f": {kind}{value}"))
        elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            found.append((one.targets[0].id, f"= {ast.unparse(one.value)}"))
    return found


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = [f"@{ast.unparse(one)} " for one in node.decorator_list]
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    for one in every:
        if one.annotation is not None:
            one.annotation = _Unquoted().visit(one.annotation)
    returns = ""
    if node.returns is not None:
        returns = f" -> {ast.unparse(_Unquoted().visit(node.returns))}"
    return f"{''.join(marks)}({ast.unparse(node.args)}){returns}"


class _Unquoted(ast.NodeTransformer):
    """Write a type alike with quotes around it and without."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        return ast.parse(node.value, mode="eval").body


def _record(releases: dict[str, Interface]) -> None:
    classes: dict[str, dict[str, dict[str, list[str]]]] = {}
    for release, interface in releases.items():
        for name, members in interface.items():
            kept = classes.setdefault(name, {})
            for member, text in members.items():
                kept.setdefault(member, {}).setdefault(text, []).append(release)
    said = {
        name: {
            member: {text: " ".join(where) for text, where in texts.items()}
            for member, texts in sorted(members.items())
        }
        for name, members in sorted(classes.items())
    }
    # A line for each member, so that a release's changes are lines in a diff.
    blocks = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(
            f"   {json.dumps(member)}: {json.dumps(texts)}"
            for member, texts in members.items()
        )
        + "\n  }"
        for name, members in said.items()
    ]
    heads = f'{{\n "releases": {json.dumps(list(releases))},\n "classes": {{\n'
    RECORD.write_text(heads + ",\n".join(blocks) + "\n }\n}\n")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a wheel, or a site-packages")
    parser.add_argument("--unpack", type=Path, help="write a wheel's modules there")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    release, found = interface_of(asked.source)
    known = recorded() if RECORD.exists() else {}
    others = [one for one in known if one != release]
    before = max(
        (one for one in others if _order(one) < _order(release)),
        key=_order,
        default=None,
    )
    print(f"vLLM {release}, since {before}:")
    lines = differences(known[before] if before else {}, found)
    print("\n".join(lines) or "no difference")
    if asked.unpack:
        with zipfile.ZipFile(asked.source) as wheel:
            modules = [one for one in wheel.namelist() if one.endswith(".py")]
            wheel.extractall(asked.unpack, modules)
    if asked.record:
        known[release] = found
        _record({one: known[one] for one in sorted(known, key=_order)})


def _order(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


if __name__ == "__main__":
    _main()
