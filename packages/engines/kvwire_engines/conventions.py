"""Whose KV can be used by whom: what keys and values mean in each engine.

Keys are stored after the rotation by position (RoPE), so two engines have the same KV
only if they rotate the same pairs of elements by the same angles, and keep heads in the
same order. These engines do, for the models and rotations in the tables below; each
entry has a test that compares both engines' KV and tokens. Everything else is refused
by name. KV of another engine differs in the last bits from what an engine computes
itself, as it does between two batch sizes; so it is used only where a program asks for
it.
"""

from __future__ import annotations

from typing import Any, Final

from kvwire.errors import UsageError

ENGINES: Final = ("mlx", "transformers")
"""They rotate element n of a head with element n + dim / 2, and keep a layer's heads in
the order of the rows of ``k_proj`` in Hugging Face's files."""

MODELS: Final = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` in config.json."""

ROTATIONS: Final = ("default", "linear", "llama3")
"""``rope_type`` in config.json: the angles of the others depend on the engine."""


def require_pair(source: str, target: str, config: Any) -> None:
    """Refuse KV of one engine in another, unless both are known to mean the same.

    Args:
        source: The engine that computes the KV.
        target: The engine that continues with it.
        config: The model's config, as an object.

    Raises:
        UsageError: The pair, the model or its rotation is not in the tables.
    """
    where = f"KV of {source} in {target}"
    for engine in (source, target):
        if engine not in ENGINES:
            raise UsageError(
                f"{where}: it is not known how {engine} keeps KV; known engines: "
                f"{', '.join(ENGINES)}"
            )
    model = getattr(config, "model_type", None)
    if model not in MODELS:
        raise UsageError(
            f"{where}: not known for models of type {model!r}; known types: "
            f"{', '.join(MODELS)}"
        )
    rotation = rotation_of(config)
    if rotation not in ROTATIONS:
        raise UsageError(
            f"{where}: not known for rope_type={rotation!r}; known rotations: "
            f"{', '.join(ROTATIONS)}"
        )


def rotation_of(config: Any) -> str:
    """Return the rotation that a config names."""
    for name in ("rope_parameters", "rope_scaling"):
        fields = getattr(config, name, None)
        if fields:
            return str(fields.get("rope_type") or fields.get("type") or "default")
    return "default"
