"""Ray Direct Transport: tensors go from actor to actor through kvwire.

::

    from kvwire.integrations.ray import register

    register()          # before a class says that it uses it

    @ray.remote(enable_tensor_transport=True)
    class Prefill:
        @ray.method(tensor_transport="KVWIRE")
        def run(self, prompt):
            return [keys, values]                # tensors stay where they are

    decode.run.remote(prefill.run.remote(prompt))  # and come to who takes them

Ray pickles what it sends itself; of kvwire nothing is. See docs/howto/ray.md.
"""

from __future__ import annotations

import os

from kvwire.config import Config
from kvwire.extras import needed_by


def listen_address() -> str:
    """Say where an actor listens: at the address that Ray knows its node by.

    On loopback where there is neither a key nor certificates; ``KVWIRE_RAY_LISTEN``
    names another address.
    """
    if listen := os.environ.get("KVWIRE_RAY_LISTEN"):
        return listen
    if Config.load().trust == "loopback":
        return "127.0.0.1:0"
    with needed_by("kvwire.integrations.ray", extra="ray"):
        import ray  # noqa: PLC0415
    return f"{ray.util.get_node_ip_address()}:0"


def register() -> None:
    """Tell Ray of the transport, in the process that defines and makes actors.

    Calling it again does no harm.
    """
    from kvwire.integrations.ray.transport import register  # noqa: PLC0415 - needs Ray

    register()


__all__ = ["listen_address", "register"]
