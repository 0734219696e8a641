"""Ray Direct Transport: tensors go from actor to actor through kvwire.

::

    from kvwire_engines.ray import register

    register()          # before a class names the transport

    @ray.remote(enable_tensor_transport=True)
    class Prefill:
        @ray.method(tensor_transport="KVWIRE")
        def run(self, prompt):
            return [keys, values]                # tensors stay where they are

    decode.run.remote(prefill.run.remote(prompt))  # and move to the user

Ray pickles its own messages; kvwire pickles nothing. See docs/howto/engines.md.
"""

from __future__ import annotations

from kvwire_engines.ray.address import listen_address


def register() -> None:
    """Register the transport with Ray, in the process that defines and makes actors.

    Repeated calls are harmless.
    """
    from kvwire_engines.ray.transport import register  # noqa: PLC0415 - needs Ray

    register()


__all__ = ["listen_address", "register"]
