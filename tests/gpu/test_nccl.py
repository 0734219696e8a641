"""On a GPU: two processes' worth of lanes over NCCL, on one GPU if it lets us.

NCCL refuses two ranks on one GPU unless they seem to be on two hosts (NCCL_HOSTID, or
NCCL_MULTI_RANK_GPU_ENABLE from 2.30). Both ranks live in this process here, so where
there is one GPU the refusal itself is what is tested: it ends the lane with a reason.
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

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
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

    two = torch.cuda.device_count() > 1
    client, server = lanes(("0", "1" if two else "0"))
    notes = LaneRecorder(), LaneRecorder()
    await server.join(client.bootstrap, notes[1])
    await client.join(server.bootstrap, notes[0])
    values = torch.arange(1 << 20, dtype=torch.int64).cuda(0)
    target = torch.zeros_like(values).cuda(1 if two else 0)
    torch.cuda.synchronize()
    descriptor = client.send(pieces(values, [0], values.nbytes), 1)
    server.receive(descriptor, Landing(8 << 20, pieces(target, [0], target.nbytes)))
    client.flush()
    server.flush()
    await until(lambda: notes[1].received or notes[1].closed or notes[0].closed)
    if not notes[1].received:
        errors = [str(error) for n in notes for error in n.closed]
        client.abort()
        server.abort()
        await until(lambda: notes[0].closed and notes[1].closed)
        assert not two, errors
        pytest.skip(f"NCCL does not take two ranks on one GPU here: {errors}")
    assert torch.equal(target.cpu(), values.cpu())
    client.abort()
    server.abort()
    await until(lambda: notes[0].closed and notes[1].closed)
