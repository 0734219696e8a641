"""What KV depends on besides tokens: the model's config, and names of a request."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def identity_of(request: Any) -> bytes:
    """Return what the KV of a request depends on besides its tokens."""
    adapter = getattr(request, "lora_request", None)
    names = [getattr(adapter, "lora_name", ""), getattr(request, "cache_salt", None)]
    names += [
        getattr(feature, "identifier", None)
        for feature in getattr(request, "mm_features", None) or ()
    ]
    # Written so that no name can look like two others: clients choose some of them.
    return json.dumps(names).encode()


def model_digest(vllm_config: Any) -> str:
    """Return what engines of one model share, wherever its files lie."""
    model = vllm_config.model_config
    facts = {
        key: value
        for key, value in model.hf_config.to_dict().items()
        if key not in _OF_THE_FILES
    }
    facts |= {
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def draft_name(vllm_config: Any) -> str:
    """Name the draft model, whose layers have caches too; "none" without one."""
    said = getattr(vllm_config, "speculative_config", None)
    model = getattr(said, "draft_model_config", None)
    # Prompts that are looked up in themselves (n-grams) have the target for a draft.
    if (
        said is None
        or model is None
        or model is getattr(said, "target_model_config", None)
    ):
        return "none"
    return f"{said.method} of {' '.join(model.architectures)}"


# What a model's config says about where it came from.
_OF_THE_FILES = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_commit_hash",
}
