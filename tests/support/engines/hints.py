"""KV hints beside requests, and the results that an engine logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.engines.serving import Engine

_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"all": {"class": "logging.StreamHandler"}},
    "loggers": {
        "vllm": {"handlers": ["all"], "level": "INFO"},
        "kvwire.hints": {"handlers": ["all"], "level": "INFO"},
    },
}


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    """An envelope of actions, which are called a0, a1, ..."""
    listed = [
        {"action_id": f"a{number}", "action_version": "0.1", **action}
        for number, action in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": listed}


def hints(*actions: dict[str, Any]) -> dict[str, Any]:
    """The field of a request to an engine over HTTP."""
    return {"kv_transfer_params": {"kv_hints": envelope(*actions)}}


def log_hints(one: Engine, folder: Path) -> None:
    """Let an engine that is not started log what becomes of hints."""
    settings = folder / "logging.json"
    settings.write_text(json.dumps(_LOGGING))
    one.environment["VLLM_LOGGING_CONFIG_PATH"] = str(settings)


def logged(one: Engine, text: str) -> bool:
    """Whether an engine has logged a text."""
    return text in one.log.read_text(errors="replace")
