"""The page's worked examples are what the client makes, and kvwire reads them so."""

from __future__ import annotations

import ast
import sys

from kvwire.kv.canonical import negotiate
from kvwire.proto.auth import Keys
from kvwire.proto.framing import Framing
from kvwire.transfers.offer import TransferOffer
from kvwire.types import Role
from kvwire.wire.control import Ping, encode_body
from kvwire.wire.handshake_messages import key_id as kvwire_key_id
from kvwire.wire.header import FrameType
from tests.protocol.examples import KEY, NONCES, PAGE, examples, named, sides, updated
from tests.support.tree import python

CLIENT = ("raw_plan", "raw_client")
THIRD_PARTIES = {"msgspec", "xxhash"}


def test_the_page_has_them() -> None:
    """Every example once; ``python -m tests.protocol.examples`` writes them."""
    page = PAGE.read_text()
    assert sorted(named(page)) == sorted(examples())
    assert updated(page) == page, f"{PAGE.name} has drifted from the client"


def test_kvwire_makes_the_same_frames() -> None:
    """Checked and sealed, with the keys that the page names."""
    keys = Keys.derive(KEY, NONCES[:32], NONCES[32:])
    frames = examples()["frames"].replace(" ", "").replace("\n", "")
    framing = Framing()
    framing.sent = 5
    body = encode_body(Ping(7))
    assert b"".join(framing.control(FrameType.PING, body)).hex() in frames
    framing.sent = 5
    framing.use_seals(Role.CLIENT, keys.seal)
    assert b"".join(framing.control(FrameType.PING, body)).hex() in frames
    for key in (kvwire_key_id(KEY), keys.accept, keys.seal[Role.CLIENT]):
        assert key.hex() in frames


def test_kvwire_reads_the_same_descriptions() -> None:
    """Both of the example, byte for byte; and takes the same order."""
    producer, consumer = sides()
    geometries = []
    for side in (producer, consumer):
        read = TransferOffer.decode(side.description())
        assert read.encode() == side.description()
        geometries.append(read.read_geometry())
    producer.meet(consumer.description())
    (walk,) = negotiate(geometries[0], geometries[1])
    assert walk.order == producer.groups[0].order
    assert walk.order == geometries[1].groups[0].order != geometries[0].groups[0].order


def test_the_client_has_nothing_of_kvwire() -> None:
    """It imports itself, the standard library, and two codecs."""
    own = {f"tests.protocol.{name}" for name in CLIENT}
    read = 0
    for source in python("tests/protocol/raw_"):
        read += 1
        for node in ast.walk(source.syntax):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                allowed = sys.stdlib_module_names | THIRD_PARTIES
                assert name in own or name.partition(".")[0] in allowed, source.path
    assert read == len(CLIENT)
