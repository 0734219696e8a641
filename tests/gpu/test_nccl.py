"""On two GPUs: lanes over NCCL in one process; test_processes.py has two on one.

NCCL refuses two ranks on one GPU in one process, and leaves sockets of theirs open.
"""

from __future__ import annotations

import pytest

from kvwire.backend import Landing
from kvwire.backend.lane import LaneContext
from kvwire.errors import BackendUnavailable
from kvwire.types import Role
from kvwire_nccl.lane import NcclLane
from kvwire_nccl.nccl import Nccl
from tests.backends.recorders import LaneRecorder
from tests.gpu.devices import Gpu, pieces
from tests.support.pairs import until

pytestmark = [pytest.mark.gpu]
_SETTINGS = {"start_timeout_s": "8", "move_timeout_s": "8"}


def lanes(devices: tuple[str, str]) -> list[NcclLane]:
    roles = (Role.CLIENT, Role.SERVER)
    try:
        return [
            NcclLane(
                LaneContext(role=role, number=1, secret=bytes(32)),
                Nccl({**_SETTINGS, "device": device}),
            )
            for role, device in zip(roles, devices, strict=True)
        ]
    except BackendUnavailable as exc:
        pytest.skip(f"NCCL lanes cannot be made here: {exc}")


async def test_a_payload_between_two_ranks() -> None:
    Gpu("torch")
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("two ranks in one process need two GPUs")
    client, server = lanes(("0", "1"))
    notes = LaneRecorder(), LaneRecorder()
    await server.join(client.bootstrap, notes[1])
    await client.join(server.bootstrap, notes[0])
    values = torch.arange(1 << 20, dtype=torch.int64).cuda(0)
    target = torch.zeros_like(values).cuda(1)
    torch.cuda.synchronize()
    descriptor = client.send(pieces(values, [0], values.nbytes), 1)
    server.receive(descriptor, Landing(8 << 20, pieces(target, [0], target.nbytes)))
    client.flush()
    server.flush()
    await until(lambda: notes[1].received or notes[1].closed or notes[0].closed)
    assert notes[1].received, [str(error) for n in notes for error in n.closed]
    assert torch.equal(target.cpu(), values.cpu())
    client.abort()
    server.abort()
    await until(lambda: notes[0].closed and notes[1].closed)
