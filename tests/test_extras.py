"""The commands that install optional dependencies: each works where it is printed."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import weakref
from pathlib import Path

import pytest

from kvwire import extras
from kvwire.errors import BackendUnavailable
from kvwire.extras import install_command, needed_by
from kvwire.memory.device.ops import device_errors
from kvwire.types import Device, MemoryKind
from tests.support.runs import WITHOUT, python
from tests.support.tree import CODE, TESTS, sources

GPU = Device(MemoryKind.CUDA, 0)
METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: 0.1.0
Requires-Dist: numpy>=1.26
Requires-Dist: obstore>=0.8; extra == 'store'
Requires-Dist: torch>=2.4; extra == 'demo'
Requires-Dist: transformers>=5; (sys_platform == 'linux') and extra == 'demo'
"""
# An index has no kvwire, so these install nothing: pip install 'kvwire[ucx]'.
_FROM_AN_INDEX = re.compile(r"(?:pip install|or|and) (?:-\S+ )?['\"\\]*kvwire(?:\[|$)")


class Environment:
    """An installation of kvwire in a folder, and a folder that it was made from."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = root / "clone of mine"
        self.source.mkdir()
        (self.source / "pyproject.toml").touch()
        self._site = root / "site-packages"
        self.install("kvwire")
        monkeypatch.syspath_prepend(str(self._site))
        monkeypatch.setattr(extras, "_ROOT", self._site)

    def install(self, name: str, **facts: object) -> None:
        """Install a distribution; pip notes where it was installed from (PEP 610)."""
        info = self._site / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(METADATA.format(name=name))
        if facts:
            (info / "direct_url.json").write_text(json.dumps(facts))


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    return Environment(tmp_path, monkeypatch)


def test_in_a_clone_it_names_the_clone(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable installation stays one."""
    monkeypatch.setattr(extras, "_ROOT", environment.source)
    assert install_command("ucx") == f"pip install -e '{environment.source}[ucx]'"
    monkeypatch.chdir(environment.source)
    assert install_command("ucx") == "pip install -e '.[ucx]'"


def test_a_clone_that_was_installed_from(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.install("kvwire", url=environment.source.as_uri(), dir_info={})
    assert install_command("demo") == f"pip install '{environment.source}[demo]'"
    monkeypatch.chdir(environment.source)
    assert install_command("demo") == "pip install '.[demo]'"


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        ({}, "'obstore>=0.8'"),
        ({"dir_info": {}}, "'{source}[store]'"),
        ({"dir_info": {"editable": True}}, "-e '{source}[store]'"),
    ],
)
def test_a_package_on_kvwire_has_extras_of_its_own(
    facts: dict[str, object],
    command: str,
    environment: Environment,
) -> None:
    environment.install("kvwire-shelf", url=environment.source.as_uri(), **facts)
    said = install_command("store", distribution="kvwire-shelf")
    assert said == f"pip install {command.format(source=environment.source)}"


@pytest.mark.parametrize(
    ("url", "facts"),
    [
        ("file:///no/such/clone", {"dir_info": {}}),
        ("file:///dist/kvwire-0.1.0-py3-none-any.whl", {"archive_info": {}}),
        ("https://example.org/kvwire.git", {"vcs_info": {"vcs": "git"}}),
        ("", {}),
    ],
)
def test_without_a_clone_it_names_the_packages(
    environment: Environment, url: str, facts: dict[str, object]
) -> None:
    if url:
        environment.install("kvwire", url=url, **facts)
    assert install_command("store") == "pip install 'obstore>=0.8'"
    assert install_command("demo") == "pip install 'torch>=2.4' 'transformers>=5'"


def test_a_current_directory_that_is_gone(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.install("kvwire", url=environment.source.as_uri(), dir_info={})
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert install_command("ucx") == f"pip install '{environment.source}[ucx]'"


def test_a_module_that_is_not_there() -> None:
    """Its importer says who needs it and what to do; other errors are untouched."""
    with (
        pytest.raises(ModuleNotFoundError, match="the proxy needs no_such") as caught,
        needed_by("the proxy", extra="vllm"),
    ):
        import no_such_module  # type: ignore[import-not-found]
    assert caught.value.name == "no_such_module"
    assert str(caught.value).endswith(install_command("vllm"))
    with (
        pytest.raises(ModuleNotFoundError, match=r": pip install vllm$"),
        needed_by("the connector", command="pip install vllm"),
    ):
        import no_such_module  # noqa: F401
    with pytest.raises(ImportError, match="cannot import"), needed_by("x", extra="ucx"):
        from json import no_such_name  # type: ignore[attr-defined]  # noqa: F401


INTEGRATIONS = (
    "prometheus_client kvwire.observe.prometheus",
    "redis kvwire.directory.redis",
    "nats kvwire.directory.nats",
    "ray kvwire.directory.ray",
    "opentelemetry kvwire.observe.opentelemetry",
)


def test_a_shared_library_that_is_not_there_is_named() -> None:
    said = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    with (
        pytest.raises(ModuleNotFoundError, match=r"a tier needs obstore, .*libib"),
        needed_by("a tier", extra="objects"),
    ):
        raise ImportError(said, name="obstore")


def test_an_integration_names_what_it_needs() -> None:
    """Imported without it, it says what to install."""
    done = python("-c", WITHOUT, *INTEGRATIONS, check=True)
    for line, said in zip(INTEGRATIONS, done.stdout.splitlines(), strict=True):
        package = line.split()[0]
        assert re.search(f" needs {package}.*, .* not installed: pip install .+", said)


def test_no_page_and_no_message_installs_what_no_index_has() -> None:
    """Until kvwire is on one, `pip install 'kvwire[ucx]'` finds nothing."""
    places = ("README.md", "docs/", *CODE, *TESTS, "examples/")
    pages = [page for page in sources(*places) if "test_extras" not in page.path]
    wrong = [
        f"{page.path}: {line.strip()}"
        for page in pages
        for line in page.text.splitlines()
        if _FROM_AN_INDEX.search(line)
    ]
    assert not wrong


@pytest.mark.parametrize("statement", [needed_by("x", extra="ucx"), device_errors(GPU)])
def test_an_error_in_the_place_of_another_keeps_no_memory(
    statement: needed_by | device_errors,
) -> None:
    """Nor does it wait for the garbage collector to give it back."""

    class Memory:
        """Stands for a block that is decoded into."""

    def fill(_: Memory) -> None:
        with statement:
            raise ModuleNotFoundError("no such module", name="such")

    def get() -> weakref.ref[Memory]:
        memory = Memory()
        with contextlib.suppress(ModuleNotFoundError, BackendUnavailable):
            fill(memory)
        return weakref.ref(memory)

    gc.disable()
    try:
        assert get()() is None
    finally:
        gc.enable()
