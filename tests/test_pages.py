"""The pages say what the code says, where both have a table or a name."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import inspect

import kvwire
import kvwire_store
from kvwire import limits
from kvwire.backend import API_VERSION
from kvwire.errors import WireCode
from kvwire.kv.blocks import DEFAULT_GROUP
from kvwire.kv.layout import AXES
from kvwire.kv.spec import (
    DTYPE_BYTES,
    KV_HEAD_DIM_MAX,
    KV_HEADS_MAX,
    KV_SHARDS_MAX,
    KVSpec,
)
from kvwire.proto.auth import Keys
from kvwire.security import keys
from kvwire.transfers.incoming import SEGMENT_BYTES_MAX
from kvwire.transfers.offer import TRACE_BYTES, TransferOffer
from kvwire.types import Role
from kvwire.wire.control import _BODIES
from kvwire.wire.header import _BODY_BYTES, FIRST_PAYLOAD_TYPE, FrameType
from tests.support.tree import ROOT, python, sources

PAGES = ("protocol.md", "protocol-kv-transfers.md")
PAGE = "".join((ROOT / "docs" / "topics" / name).read_text() for name in PAGES)


def rows(*columns: str) -> list[tuple[str, ...]]:
    """The rows of all tables whose cells match these patterns, in their order."""
    pattern = r"^\| *" + r" *\| *".join(f"({column})" for column in columns) + r" *\|"
    return re.findall(pattern, PAGE, re.MULTILINE)


def table(*headings: str) -> list[list[str]]:
    """The cells of the table that begins with these headings."""
    begin = re.escape("| " + " | ".join(headings) + " |")
    pattern = rf"^{begin}.*\n\|-.*\n((?:\|.*\n)+)"
    (found,) = re.findall(pattern, PAGE, re.MULTILINE)
    lines = found.splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def number(text: str) -> int:
    return int(text.replace(",", ""), 0)


def test_the_table_of_frames() -> None:
    """Every type with its number, its kind of body and its bounds."""
    found = rows(r"0x[0-9a-f]{2}", r"[A-Z]+(?:_[A-Z]+)*", r"\w+", r"[\d,]+", r"[\d,]+")
    described = {
        number(value): (name, kind, number(low), number(high))
        for value, name, kind, low, high in found
    }
    assert len(described) == len(found)
    for frame_type in FrameType:
        kind = "payload" if frame_type >= FIRST_PAYLOAD_TYPE else "control"
        if frame_type <= FrameType.REFUSE:
            kind = "fixed"
        low, high = _BODY_BYTES[frame_type]
        assert described.pop(frame_type) == (frame_type.name, kind, low, high)
    assert not described


def test_the_table_of_codes() -> None:
    """Every code but OK, which is never sent."""
    described = {
        int(value): name for value, name in rows(r"\d+", r"[A-Z]+(?:_[A-Z]+)*")
    }
    assert described == {int(c): c.name for c in WireCode if c is not WireCode.OK}


def test_the_table_of_control_bodies() -> None:
    """Every body, with as many fields as it has."""
    described = {
        name: text
        for names, text in rows(r"[A-Z_]+(?:, [A-Z_]+)?", r"[^|]*[a-z][^|]*")
        for name in names.split(", ")
    }
    for frame_type, body in _BODIES.items():
        kind = inspect.type_info(body)
        assert isinstance(kind, inspect.StructType)
        text = re.sub(r"\([^)]*\)", "", described[FrameType(frame_type).name])
        depth, fields = 0, 1
        for letter in text:
            depth += (letter == "[") - (letter == "]")
            fields += letter == "," and not depth
        assert fields == len(kind.fields), FrameType(frame_type).name


def test_the_labels_of_keys() -> None:
    """One for each key that is derived."""
    labels = set(
        re.findall(
            r"`kvwire ((?:server|client) proof|\w+ (?:client|server)|lane)`", PAGE
        )
    )
    keys = Keys.derive(b"", bytes(32), bytes(32))
    assert len(labels) == 2 + len(keys.seal) + len(keys.grant) + len([keys.lane])
    assert {f"seal {role.name.lower()}" for role in Role} <= labels


def test_the_table_of_a_description() -> None:
    """Every field in its order, those with a default, and how many there may be."""
    kind = inspect.type_info(TransferOffer)
    assert isinstance(kind, inspect.StructType)
    described = table("description", "type")
    assert [name for name, *_ in described] == [field.name for field in kind.fields]
    optional = [name for name, _, default, _ in described if default]
    assert optional == [field.name for field in kind.fields if not field.required]
    types = " ".join(text for _, text, *_ in described)
    assert [number(text) for text in re.findall(r"[\d,]*\d", types)] == [
        *(1, limits.KV_GROUPS_MAX, 8, 8, 32, limits.KV_GROUPS_MAX),
        *(limits.LANDED_BOXES_MAX, 0, 2, 32, 1, 16, TRACE_BYTES),
    ]


def test_the_table_of_a_group() -> None:
    """As a geometry has them."""
    described = {name: text for name, text, _ in table("group", "type")}
    assert list(described) == ["name", "spec", "order", "blocks", "tokens"]
    assert f"1 to {limits.NAME_CHARS_MAX} characters" in described["name"]
    assert f"at most {limits.PROFILE_FIELDS_MAX} " in described["spec"]
    assert described["blocks"] == f"0 to {limits.KV_BLOCKS_MAX:,}"
    assert f"`{' '.join(AXES)}`" in PAGE
    assert f"cache without groups `{DEFAULT_GROUP}`" in PAGE


def test_the_table_of_a_spec() -> None:
    """Every name that travels, and how far its value goes."""
    described = {name: text for name, text, _ in table("spec", "value")}
    spec = KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=1,
        components=1,
        dtype="uint8",
        kind="state",
    )
    assert sorted(described) == sorted(name for name, _ in spec.to_pairs())
    most = {
        "layers": limits.KV_LAYERS_MAX,
        "kv_heads": KV_HEADS_MAX,
        "head_dim": KV_HEAD_DIM_MAX,
        "block_tokens": limits.KV_BLOCK_TOKENS_MAX,
        "components": 2,
        "shard_rank": KV_SHARDS_MAX - 1,
        "shard_size": KV_SHARDS_MAX,
        "model_kv_heads": KV_HEADS_MAX,
        "first_layer": limits.KV_LAYERS_MAX,
        "model_layers": limits.KV_LAYERS_MAX,
    }
    for name, bound in most.items():
        least = 0 if name in ("shard_rank", "first_layer") else 1
        assert described[name] == f"{least} to {bound:,}"
    assert {described["dtype"], described["fingerprint"]} == {"text"}
    ((*_, types),) = rows("dtype", "text", "[^|]*")
    assert set(re.findall(r"`(\w+)`", types)) == set(DTYPE_BYTES)


def test_limits_in_the_text() -> None:
    """Each number that a peer has to keep is the one of limits.py."""
    text = " ".join(PAGE.split())
    for said in (
        f'offers `[["tcp", {API_VERSION}]]`',
        f"pre-shared key ({keys.PSK_BYTES_MIN} to {keys.PSK_BYTES_MAX:,} bytes)",
        f"at most {limits.SEGMENTS_MAX:,}), its *box*",
        f"At most {limits.SETTLED_MAX:,} of them fit",
        f"has more than {limits.KV_PIECES_MAX:,} pieces",
        f"more than one for each {limits.KV_PIECE_BYTES} bytes",
        f"at most {limits.REQUEST_BYTES_MAX // limits.GIB} GiB",
        f"has at most {SEGMENT_BYTES_MAX // limits.MIB} MiB",
        f"at about {limits.SEGMENT_BYTES // limits.MIB} MiB",
        f"At most {limits.TRANSFERS_WAITING_MAX:,} transfers",
        f"at most {limits.DESCRIPTION_BYTES_MAX // limits.KIB} KiB",
    ):
        assert said in text, said


# --- what the pages for operators say of the code, of systemd and of Kubernetes -------


HOWTO = ROOT / "docs" / "howto"
# Stands in a text of the code for what is formatted into it.
_HOLE = "\0"


def texts(tree: ast.AST) -> Iterator[str]:
    """Each text of a file, what is formatted into it as a hole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            yield "".join(
                str(p.value) if isinstance(p, ast.Constant) else _HOLE for p in parts
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?[rsdg]", _HOLE, node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield "".join(texts(node.left)) + "".join(texts(node.right))


def code_texts() -> set[str]:
    """Every text of the code that is installed."""
    found: set[str] = set()
    for name in ("", "_local", "_tcp", "_ucx", "_store"):
        spec = importlib.util.find_spec(f"kvwire{name}")
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for file in Path(folder).rglob("*.py"):
                found.update(texts(ast.parse(file.read_text())))
    return found


def quoted_messages(page: str) -> list[str]:
    """What stands as code in the first column of a page's tables."""
    return re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)


def said_by(message: str, known: set[str]) -> bool:
    """Whether a text of the code can say this; ``...`` is anything."""
    parts = (re.escape(part.strip()) for part in message.split("..."))
    # A word that the system says, such as that of an errno, is formatted in.
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in known)


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    known = code_texts()
    messages = quoted_messages((HOWTO / "troubleshooting.md").read_text())
    assert len(messages) >= 30
    system = {
        "cannot connect to ...: Connection refused": "cannot connect to ...: ...",
        "cannot connect to ...: no answer within ... s": "no answer within ... s",
    }
    unsaid = [m for m in messages if not said_by(system.get(m, m), known)]
    assert not unsaid


def test_a_message_that_nobody_says_is_found() -> None:
    known = {f"the peer {_HOLE} has not published it", "a, b"}
    assert said_by("the peer ... has not published it", known)
    assert not said_by("the peer ... has published it", known)
    assert quoted_messages("| `a ...` | why | do |\n| b | `c` | d |\n") == ["a ..."]


def code_block(language: str) -> str:
    """The one block of a language on the page of deployment."""
    page = (HOWTO / "deployment.md").read_text()
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    return str(found)


def test_the_unit_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(code_block("ini"))
    command = unit["Service"]["ExecStart"].replace("\\\n", " ").split()
    assert command[0].endswith("bin/kvwire")
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert all(f"`{w}" in reference for w in command if w.startswith("--"))


def test_the_manifests_fit_the_example_and_each_other() -> None:
    """Ports, probes, mounts and the time that a pod has to go down."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, *deployments = yaml.safe_load(code_block("yaml"))["items"]
    example = (ROOT / "examples" / "fastapi_pair.py").read_text()
    request_s = float(re.findall(r"REQUEST_S: Final = ([\d.]+)", example)[0])
    for deployment in deployments:
        spec = deployment["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        wait_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > wait_s + request_s + 5
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        ports = {port["containerPort"] for port in container["ports"]}
        assert {port for port, _ in probes(container)} == ports
        assert {path for _, path in probes(container)} <= {"/health", ""}
        assert all(option in example for option in container["command"][2:3])
    labels = deployments[0]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert (
        f"http://prefill:{service['spec']['ports'][0]['port']}" in container["command"]
    )


def probes(container: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Port and path of each probe."""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name, {})
        for kind in ("httpGet", "tcpSocket"):
            if kind in probe:
                yield probe[kind]["port"], probe[kind].get("path", "")


# --- what the pages about the structure name is there ---------------------------------


_PAGES = ("docs/topics/architecture.md", "CONTRIBUTING.md")
_FOLDERS = ("", "kvwire", "backends", "packages")


def _named(page: str) -> list[str]:
    """What stands in backticks on a page, outside of programs."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def test_every_file_that_the_page_names_is_there() -> None:
    files = [name for name in _named(_PAGES[0]) if re.fullmatch(r"[\w/]+\.py", name)]
    assert files
    assert [
        name
        for name in files
        if not any((ROOT / folder / name).exists() for folder in _FOLDERS)
    ] == []


@pytest.mark.parametrize("page", _PAGES)
def test_every_class_that_a_page_names_is_there(page: str) -> None:
    code = python("kvwire/", "backends/", "packages/")
    text = "\n".join(source.text for source in code)
    classes = set(re.findall(r"^class (\w+)", text, re.MULTILINE))
    named = {
        name.partition(".")[0]
        for name in _named(page)
        if re.match(r"(?:[A-Z][a-z]+){2,}(?:\.\w+)?$", name)
    }
    assert named - classes - {"NewType", "UsageError"} == set()


# --- docs/reference/verbs.md: each call on it exists, and takes what the page gives it


VERBS: Final = (ROOT / "docs" / "reference" / "verbs.md").read_text()
OBJECTS: Final[dict[str, list[Any]]] = {
    "comm": [kvwire.Communicator],
    "conn": [kvwire.Connection, kvwire.Peer],
    "region": [kvwire.Region],
    "window": [kvwire.Window],
    "remote": [kvwire.RemoteWindow],
    "store": [kvwire_store.BlockStore],
    "request": [kvwire.Request],
    "out": [kvwire.Outgoing, kvwire.EngineOutgoing],
    "inc": [kvwire.Incoming, kvwire.EngineIncoming],
    "engine": [kvwire.Engine],
}


def verb_calls() -> list[ast.Call]:
    """Every call of the page, as `comm.listen(address)`."""
    spans = re.findall(r"`([^`]+\))`", VERBS)
    nodes = [
        node
        for span in spans
        for node in ast.walk(ast.parse(span.replace("=...", "=None")))
    ]
    return [node for node in nodes if isinstance(node, ast.Call)]


def test_each_call_is_one_of_its_class() -> None:
    checked = set()
    for call in verb_calls():
        assert isinstance(call.func, ast.Attribute)
        assert isinstance(call.func.value, ast.Name)
        kinds = OBJECTS[call.func.value.id]
        name = call.func.attr
        checked.add(name)
        own = [method for kind in kinds if (method := getattr(kind, name, None))]
        assert own, f"{call.func.value.id}.{name}"
        # Without self.
        for method in own:
            keywords = {str(keyword.arg): None for keyword in call.keywords}
            signature(method).bind(None, *call.args, **keywords)
    assert len(checked) > 30


def test_the_page_has_every_verb() -> None:
    """Those of a connection and of a peer, with their other halves."""
    here = {
        call.func.attr for call in verb_calls() if isinstance(call.func, ast.Attribute)
    }
    verbs = {"send", "recv", "put", "get", "window", "pull", "push"}
    assert verbs <= {name for name in vars(kvwire.Peer) if name[0] != "_"}
    assert verbs <= here
    assert {"publish", "expect", "register", "expose", "announce", "listen"} <= here


def test_threads_have_the_calls_of_the_page() -> None:
    text = VERBS.partition("## From threads")[2]
    names = re.search(r"has (.+?), which", text.replace("\n", " "))
    assert names is not None
    listed = re.findall(r"`(\w+)`", names[1])
    assert listed
    assert all(hasattr(kvwire.Engine, name) for name in listed), listed


# --- the memory contract names a test for each of its lines; the tests are there ------


CONTRACT = "docs/topics/memory-contract.md"
_NAMED = re.compile(r"`(?:tests/(?:\w+/)*)?(test_\w+)(\.py)?`")
_FUNCTION = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)


def test_every_test_that_the_page_names_exists() -> None:
    (page,) = sources(CONTRACT)
    files = python("tests/")
    modules = {source.path.rpartition("/")[2] for source in files}
    functions = {name for source in files for name in _FUNCTION.findall(source.text)}
    named = {name + suffix for name, suffix in _NAMED.findall(page.text)}
    assert len(named) > 20
    assert named <= functions | modules, sorted(named - functions - modules)


def test_every_line_of_a_table_says_where_it_is_shown() -> None:
    (page,) = sources(CONTRACT)
    rows = [line for line in page.lines if line.startswith("| ")]
    headings = [row for row in rows if row.endswith("| shown by |")]
    for row in rows:
        if row not in headings:
            assert _NAMED.search(row) or row.endswith("| same |"), row
    assert len(headings) == 4
