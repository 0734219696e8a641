"""R11: a peer that restarts."""

from __future__ import annotations

import kvwire
from tests.support.world import DEST, LIST, World, scenario


@scenario()
async def test_r11_peer_restarts_on_the_same_address(w: World) -> None:
    out, inc = w.begin()
    out.ready(layers=0)
    await inc.layer(0)
    w.p.abort()
    await w.p.close()
    async with kvwire.open(name="prefill") as again:
        assert await again.listen(w.address) == w.address
        # At once, and not when the lease of 30 s ends.
        outcome = await inc
        said = "the peer has restarted; the peer's side of it is gone"
        assert said in outcome.missing["kv", DEST[0]]
        await inc.drained()
        late = w.pull_side.pull("u", w.target.cache, DEST)
        assert not (await late).complete
        await late.drained()
        # Nothing is wedged: the same names work with the new start.
        w.pull_side = await w.d.connect(w.address)
        w.p = again
        assert w.pull_side.peer.incarnation == again.incarnation
        assert await w.moves("t", LIST, DEST)
        # The link that found the new start out is not kept.
        await w.until(lambda: len(w.d.live_connections) == 1)
