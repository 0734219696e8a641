"""Which engines can use each other's KV: the meaning of keys and values in each.

Keys are kept after the rotation by position (RoPE). So two engines have the same KV
only if they rotate the same pairs of elements by the same angles, keep heads in the
same order, and attend to the same tokens. For the models and rotations in the tables
below that is known, and each entry has a test that compares both engines' tokens and
logits. Everything else is refused by name.

A config.json is not enough: mlx_lm ignores the ``rope_parameters`` that transformers 5
writes for some models, and then computes other keys without a word. So each side names
the rotation that *its* engine has read, and checks that name against the angles of the
loaded model. KV of engines that have read different rotations is never found.

KV of another engine differs in the last bits from what an engine computes itself, as it
does between two batch sizes. So it is used only where a program asks for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError

ENGINES: Final = ("mlx", "transformers", "vllm")
"""They rotate element n of a head with element n + dim / 2, and keep a layer's heads in
the order of the rows of ``k_proj`` in Hugging Face's files."""

MODELS: Final = ("llama", "mistral", "qwen2", "qwen3")
"""``model_type`` in config.json."""

ROTATIONS: Final = ("default", "linear", "llama3")
"""``rope_type`` in config.json: the angles of the others depend on the engine."""

# What the angles of each are computed from.
_NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": (
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}

ACTIVATIONS: Final = ("silu",)
"""``hidden_act`` in config.json: mlx_lm knows no other for these models."""

Vector: TypeAlias = npt.NDArray[np.float64]
Turned: TypeAlias = Callable[[int], Any]
"""Return a head of ones that the model has rotated for a position, in float32."""

# Far enough for small frequencies to show, and near enough for float32.
_POSITIONS: Final = (1, 4000)
_TOLERANCE: Final = 5e-3


class Meaning(NamedTuple):
    """The facts on which an engine's keys and values depend, besides the weights.

    Attributes:
        model: ``model_type`` of the config.
        rotation: ``rope_type``.
        numbers: The rotation's numbers, by name, ``rope_theta`` among them.
        epsilon: ``rms_norm_eps``.
        window: Tokens of a sliding window; 0 if all layers attend to all tokens.
        activation: ``hidden_act``.
    """

    model: str
    rotation: str
    numbers: tuple[tuple[str, float], ...]
    epsilon: float
    window: int
    activation: str

    @property
    def digest(self) -> str:
        """Return a short name for it, equal in engines that have read the same."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16]

    def named(self, weights: str, engine: str) -> str:
        """Return the name under which an engine keeps KV of these weights."""
        return f"{weights} {engine} {self.digest}"


def meaning_of(config: Any, rotation: Mapping[str, Any] | None, theta: Any) -> Meaning:
    """Return the meaning of a model's KV, as its engine has read it.

    Args:
        config: The model's config, as an object.
        rotation: ``rope_parameters`` or ``rope_scaling``, as the engine uses it.
        theta: ``rope_theta``, if it is not in `rotation`.
    """
    fields = dict(rotation or {})
    named = str(fields.pop("rope_type", None) or fields.pop("type", None) or "default")
    fields.pop("type", None)
    fields.setdefault("rope_theta", theta)
    numbers = {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, int | float)
    }
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    window = getattr(config, "sliding_window", None) or 0
    return Meaning(
        str(getattr(config, "model_type", "")),
        named,
        tuple(sorted(numbers.items())),
        float(getattr(config, "rms_norm_eps", 0)),
        int(window) if "sliding_attention" in kinds else 0,
        str(getattr(config, "hidden_act", None) or "silu"),
    )


def require_known(where: str, engine: str, meaning: Meaning) -> None:
    """Refuse an engine, a model or a rotation that is not in the tables.

    Args:
        where: The beginning of the error message.
        engine: The engine that computes the KV.
        meaning: What the KV means, in either engine.

    Raises:
        UsageError: It is not; the text names the possible ones.
    """
    for what, found, known in (
        ("engine", engine, ENGINES),
        ("model_type", meaning.model, MODELS),
        ("rope_type", meaning.rotation, ROTATIONS),
        ("hidden_act", meaning.activation, ACTIVATIONS),
    ):
        if found not in known:
            raise UsageError(
                f"{where}: not known for {what} {found!r}; known are {', '.join(known)}"
            )
    if meaning.window:
        raise UsageError(
            f"{where}: this model has a window of {meaning.window} tokens, and engines "
            "differ in what they do at its edge; only full attention is known"
        )


def rotates_so(meaning: Meaning, turned: Turned, dim: int) -> bool:
    """Return whether a model rotates keys as its config describes.

    Args:
        meaning: The description in the config.
        turned: The model's rotation.
        dim: Elements of a head.
    """
    numbers = {name for name, _ in meaning.numbers}
    if not numbers.issuperset(_NUMBERS.get(meaning.rotation, ("unknown",))):
        return False  # it has no rotation, or one that is not in the tables
    frequencies = _frequencies(meaning, dim)
    for position in _POSITIONS:
        cos = np.cos(position * frequencies)
        sin = np.sin(position * frequencies)
        expected = np.concatenate((cos - sin, cos + sin))
        found = np.asarray(turned(position), np.float64)
        if found.shape != expected.shape:
            return False
        if not np.allclose(found, expected, atol=_TOLERANCE):
            return False
    return True


def _frequencies(meaning: Meaning, dim: int) -> Vector:
    """Return the angle of each pair of elements at position 1."""
    numbers = dict(meaning.numbers)
    plain: Vector = numbers["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if meaning.rotation == "default":
        return plain
    factor = numbers["factor"]
    if meaning.rotation == "linear":
        return plain / factor
    low = numbers["low_freq_factor"]
    high = numbers["high_freq_factor"]
    turns = numbers["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * plain / factor + smooth * plain
