"""The worked examples of the page about KV transfers, made by the raw client."""

from __future__ import annotations

import zlib

import msgspec

from tests.protocol import raw_client as raw
from tests.protocol.raw_plan import Box, Share, plan_digest, plan_text

KEY, NONCES = bytes([1]) * 32, bytes([2]) * 32 + bytes([3]) * 32
WHOLE: Box = (0, 0, 2, 0, 3)
_LINE_BYTES = 24


def sides() -> tuple[raw.Side, raw.Side]:
    """A producer with two blocks of 4 tokens and a consumer with three of 2."""
    shares = []
    for size, blocks, order in (
        (4, 2, "layer block kv token head dim"),
        (2, 3, "layer block kv head token dim"),
    ):
        spec = {
            "layers": 2,
            "kv_heads": 2,
            "head_dim": 2,
            "block_tokens": size,
            "dtype": "uint8",
            "components": 2,
            "shard_rank": 0,
            "shard_size": 1,
            "fingerprint": "m",
            "model_kv_heads": 2,
            "first_layer": 0,
            "model_layers": 2,
        }
        pairs = [(name, str(value)) for name, value in spec.items()]
        shares.append(raw.RawCache(Share("kv", pairs, order, blocks, 6), range(3), 3))
    producer = raw.Side(id=b"sx", cache=shares[0], producer=True, end=b"producer")
    consumer = raw.Side(id=b"sx", cache=shares[1], producer=False, end=b"consumer")
    return producer, consumer


def examples() -> dict[str, str]:
    """Makes every example, by its name."""
    return {"frames": _frames(), "transfer": _transfer()}


def _frames() -> str:
    ping = msgspec.msgpack.encode([7])
    checked = raw.header(raw.PING, raw.CHECKED, 5, len(ping), 0, 0, 0, zlib.crc32(ping))
    sealed = raw.header(raw.PING, raw.SEALED, 5, len(ping) + raw.SEAL_BYTES)
    key = raw.derive(KEY, NONCES, "seal client")
    place = (1, 2, 65_536, raw.payload_check(b"kvwire"))
    return _listed(
        ("PING 7, the sixth frame of its direction", checked + ping),
        ("DATA `kvwire`", raw.header(raw.DATA, raw.CHECKED, 6, 6, *place) + b"kvwire"),
        ("key id", raw.key_id(KEY)),
        ("server proof key", raw.derive(KEY, NONCES, "server proof")),
        ("server proof key in loopback mode", raw.derive(b"", NONCES, "server proof")),
        ("seal key of the client", key),
        ("the same PING, sealed", sealed + ping + raw.seal(key, 5, sealed, ping)),
    )


def _transfer() -> str:
    producer, consumer = sides()
    opened = consumer.description()
    producer.meet(opened)
    consumer.meet(producer.description())
    (group,) = producer.groups
    ask = msgspec.msgpack.encode((b"sx", True, 0, opened))
    first = [
        f"layer {e.layer} token {e.token} kv {e.kv} head {e.head} dim {e.dim}"
        for e in group.elements(WHOLE)
    ]
    mark = msgspec.msgpack.encode((1, WHOLE, group.nbytes(WHOLE)))
    asked = raw.header(raw.OPEN, raw.CHECKED, 4, len(ask), 1, 0, 0, zlib.crc32(ask))
    marked = raw.header(
        raw.SEGMENT, raw.CHECKED, 3, len(mark), 1, 0, 0, zlib.crc32(mark)
    )
    return (
        _listed(
            ("the consumer's description", opened),
            ("OPEN, the client's fifth frame: its header", asked),
            ("and its body before the description", ask[: -len(opened)]),
        )
        + f"text of the plan\n  {plan_text(producer.groups)}\n"
        + _listed(
            ("the moved granules as bits", b"\xe0"),
            ("plan", plan_digest(producer.groups)),
            ("SEGMENT of everything, the server's fourth frame", marked + mark),
        )
        + "the segment's first bytes\n  "
        + "\n  ".join(first[:9])
        + f"\nits last one of {len(first)}\n  {first[-1]}\n"
    )


def _listed(*lines: tuple[str, bytes]) -> str:
    text = ""
    for title, data in lines:
        text += f"{title}\n"
        for at in range(0, len(data), _LINE_BYTES):
            text += f"  {data[at : at + _LINE_BYTES].hex(' ', -4)}\n"
    return text
