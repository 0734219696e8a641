"""What vLLM finds by name, and which of its releases are let through."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwire.errors import UsageError
from kvwire_vllm import plugin
from kvwire_vllm.release import check_release, check_sleep
from packages.vllm.tests.programs.interface import classes_in
from packages.vllm.tests.support.models import make_model
from tests.support.runs import WITHOUT, python

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


def test_vllm_is_given_the_plug_in() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="kvwire")
    assert found.load() is plugin.register


def test_its_names_are_classes() -> None:
    root = Path(plugin.__file__).parents[1]
    for name, module in plugin.CONNECTORS.items():
        text = (root / f"{module.replace('.', '/')}.py").read_text()
        assert name in classes_in(text)


def test_an_engine_without_kvwire_pays_nothing() -> None:
    """The module is imported in each process of every engine."""
    code = (
        "import sys, kvwire_vllm.plugin\n"
        "print([one for one in ('vllm', 'numpy', 'asyncio') if one in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"


def test_a_release_without_its_factory_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, FACTORY, None)
    with caplog.at_level(logging.WARNING, "kvwire"):
        plugin.register()
    assert "kv_connector_module_path" in caplog.text


# As vLLM's server reads its command line, up to the class of the connector.
_SERVED = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

model, *transfers = sys.argv[1:]
found = []
for text in transfers:
    said = KVTransferConfig(**json.loads(text))
    try:
        config = EngineArgs(model=model, kv_transfer_config=said).create_engine_config()
        cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        found.append(f"{cls.__module__}.{cls.__name__}")
    except ValueError as exc:
        found.append(str(exc))
print(json.dumps(found))
"""
_NAME: dict[str, Any] = {"kv_connector": "KvwireConnector", "kv_role": "kv_producer"}
_STORE: dict[str, Any] = {"kv_connector": "KvwireStoreConnector", "kv_role": "kv_both"}
_PATH = {**_NAME, "kv_connector_module_path": "kvwire_vllm.connector"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder; what writes it leaves a thread behind."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here; `make test-vllm` installs it")
    return make_model("gqa", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("plugins", [None, "others"])
def test_names_suffice_unless_plug_ins_are_left_out(
    plugins: str | None, model: Path
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"
    }
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    # By name first: a module that is imported registers its names.
    said = [json.dumps(one) for one in (_NAME, _STORE, _PATH)]
    ran = subprocess.run(
        [sys.executable, "-c", _SERVED, str(model), *said],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    connectors = json.loads(ran.stdout.splitlines()[-1])
    path = "kvwire_vllm.connector.KvwireConnector"
    assert connectors[2] == path
    if plugins is None:
        store = "kvwire_vllm.store.connector.KvwireStoreConnector"
        assert connectors[:2] == [path, store]
        return
    assert "Unsupported connector type: KvwireConnector" in connectors[0]
    assert "Unsupported connector type: KvwireStoreConnector" in connectors[1]


# --- releases of vLLM that are let through, and what is said of the others ------------


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.7+cpu", "0.33.0"])
def test_releases_that_were_tested(version: str) -> None:
    check_release(version, untested=False)


@pytest.mark.parametrize(
    "version", ["0.34.0", "0.34.0rc1.dev7+gabc", "0.29.9", "1.0.0", "0.4.2", "dev", ""]
)
def test_others_are_refused_by_name_unless_they_are_wanted(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError) as refused:
        check_release(version, untested=False)
    said = str(refused.value)
    assert said.startswith(f"vLLM {version}: kvwire was tested with 0.30 to 0.33")
    assert "pip install 'vllm>=0.30,<0.34'" in said
    assert '"untested_vllm": true' in said
    with caplog.at_level(logging.WARNING, "kvwire"):
        check_release(version, untested=True)
    assert f"vLLM {version}: " in caplog.text


def test_sleep_mode_is_refused() -> None:
    check_sleep(SimpleNamespace(enable_sleep_mode=False))
    check_sleep(SimpleNamespace())
    with pytest.raises(UsageError, match="without --enable-sleep-mode"):
        check_sleep(SimpleNamespace(enable_sleep_mode=True))


# --- what is installed beside kvwire-vllm: without it, one line says what to do--------


NEEDS = (
    "vllm kvwire_vllm.connector",
    "vllm kvwire_vllm.stats",
    "vllm kvwire_vllm.store.connector",
    "torch kvwire_vllm.connector",
)


def test_a_module_names_what_it_needs() -> None:
    done = python("-c", WITHOUT, *NEEDS, check=True)
    for line, said in zip(NEEDS, done.stdout.splitlines(), strict=True):
        package = "(torch|vllm)" if "connector" in line else line.split()[0]
        assert re.search(f" needs {package}.*, .* not installed: pip install .+", said)
