"""The connectors that are compared, and how a reference of each is forged."""

from __future__ import annotations

import secrets
from typing import Any, Final

from kvwire_vllm.references import References
from packages.vllm.tests.programs.bench.wire import Host
from packages.vllm.tests.programs.faults.arena import LEASE_S, Contender, Params
from packages.vllm.tests.support.serving import kvwire_config


def _kvwire(host: Host, listen: str, http: str) -> dict[str, Any]:
    own = {"require": ["tcp"], "lease_s": LEASE_S, "http": http, **host.trust}
    return kvwire_config(listen, own)


def _nixl(host: Host, listen: str, http: str) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }


# A client cannot sign; whoever holds the key could be wrong all the same.
def _unknown_to_kvwire(params: Params, signer: References) -> Params:
    return signer.signed({**params, "transfer_id": secrets.token_hex(16)})


def _unknown_to_nixl(params: Params, signer: References) -> Params:
    return {**params, "remote_request_id": f"cmpl-{secrets.token_hex(16)}-0"}


# Its references have no block ids: what a number can be is the port of an address.
def _out_of_range_for_kvwire(params: Params, signer: References) -> Params:
    host = params["remote"][0].rpartition(":")[0]
    return signer.signed({**params, "remote": [f"{host}:1"]})


def _out_of_range_for_nixl(params: Params, signer: References) -> Params:
    blocks = [
        [1_000_000 + block for block in group] for group in params["remote_block_ids"]
    ]
    return {**params, "remote_block_ids": blocks}


CONTENDERS: Final = {
    "kvwire": Contender(
        "kvwire", _kvwire, _unknown_to_kvwire, _out_of_range_for_kvwire
    ),
    "nixl": Contender(
        "NixlConnector",
        _nixl,
        _unknown_to_nixl,
        _out_of_range_for_nixl,
        {"UCX_TLS": "tcp,self"},
    ),
}
