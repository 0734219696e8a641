"""What the KV of a request depends on, besides its tokens."""

from __future__ import annotations

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
