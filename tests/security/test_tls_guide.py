"""The guide to certificates, done as it says: its commands, and its configuration."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

import kvwire
from tests.support.runs import ran

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "tls.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def made(folder: Path) -> None:
    """The CA, and the certificates of two workers."""
    ca, worker = blocks("sh")
    scripts = [ca, worker, worker.replace("decode-0", "prefill-0")]
    for script in scripts:
        done = ran("bash", "-ec", script, cwd=folder)
        assert done.returncode == 0, done.stderr


def configured(folder: Path, name: str, peer: str) -> kvwire.Config:
    """The guide's configuration, for one of the two."""
    (text,) = blocks("toml")
    values = tomllib.loads(text.replace("/etc/kvwire", str(folder)))
    values["tls_peers"] = [f"spiffe://example.org/{peer}"]
    for key in ("tls_cert_file", "tls_key_file"):
        values[key] = values[key].replace("decode-0", name)
    return kvwire.Config(**values)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
async def test_the_guide_connects_two_workers(tmp_path: Path) -> None:
    made(tmp_path)
    async with (
        kvwire.open(configured(tmp_path, "decode-0", "prefill-0")) as decode,
        kvwire.open(configured(tmp_path, "prefill-0", "decode-0")) as prefill,
    ):
        address = await decode.listen("127.0.0.1:0")
        connection = await prefill.connect(address, transport="tcp")
        assert connection.peer.identity == "spiffe://example.org/decode-0"
        assert "inside TLS" in str(connection.transport_report)
        assert (await decode.accept()).peer.identity == "spiffe://example.org/prefill-0"
