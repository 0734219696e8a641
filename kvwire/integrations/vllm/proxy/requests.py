"""What each of the two engines is asked, made from what the client has asked."""

from __future__ import annotations

import secrets
from typing import Any, Final

from kvwire.integrations.vllm.metadata import answer
from kvwire.integrations.vllm.proxy.engines import VllmServer
from kvwire.integrations.vllm.references import References

AT_ONCE: Final = "at-once"
IN_SEQUENCE: Final = "in-sequence"

# What a client may ask of decoding that makes no sense for one token of prefill.
_OF_DECODING: Final = ("stream", "stream_options", "min_tokens", "n", "best_of")


def is_for_two(body: dict[str, Any]) -> bool:
    """Tell whether two engines can share a request.

    One transfer serves one sequence. And whoever is asked for the prompt's own
    probabilities has to compute all of it: KV from elsewhere would be of no use.
    """
    if any(type(body.get(key, 1)) is int and body.get(key, 1) > 1 for key in _COPIES):
        return False
    if body.get("prompt_logprobs") is not None:
        return False
    if body.get("echo") and body.get("logprobs") is not None:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt:
        return isinstance(prompt[0], int) or len(prompt) == 1
    return True


def new_transfer_id() -> str:
    """Return a name that no other request has."""
    return secrets.token_hex(16)


def for_prefill(
    body: dict[str, Any], decode: VllmServer, transfer_id: str, references: References
) -> dict[str, Any]:
    """Return the prefill engine's request: the prompt, and one token."""
    asked = {key: value for key, value in body.items() if key not in _OF_DECODING}
    asked["max_tokens"] = 1
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    params = answer(transfer_id, decode.remote, decode.stages)
    params |= {"do_remote_decode": True, "do_remote_prefill": False}
    return asked | {"kv_transfer_params": references.signed(params)}


def for_decode(
    body: dict[str, Any], prefill: VllmServer, transfer_id: str, references: References
) -> dict[str, Any]:
    """Return the decode engine's request: everything, with the KV elsewhere."""
    params = answer(transfer_id, prefill.remote, prefill.stages)
    params = references.signed(params)
    return body | {"kv_transfer_params": params}


_COPIES: Final = ("n", "best_of")
