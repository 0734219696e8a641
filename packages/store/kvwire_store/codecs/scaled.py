"""Lossy block codecs: fewer bits per element, and a scale per group of elements.

``fp8`` and ``int8`` have one scale for each layer, component and head of a block: the
group's largest magnitude becomes the largest number of the code.

``int4`` has a smallest value and a step for each group; its 16 codes are evenly spaced
between the smallest and the largest value. Keys have a few channels that are large for
every token, so a group of keys is one channel over the block's tokens. Values have no
such channels, so a group of values is one head of one token (KIVI,
https://arxiv.org/abs/2402.02750, and KVQuant, https://arxiv.org/abs/2401.18079). MLA's
latent is grouped like values.

A block is left unchanged if its elements are not bfloat16, float16 or float32, if a
number is not finite, or if float16 cannot hold a group's smallest value and step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.errors import IntegrityError
from kvwire.kv.codecs.codes import (
    INT4_MAX,
    of_codes,
    pack_nibbles,
    scale_of,
    to_codes,
    unpack_nibbles,
)
from kvwire.kv.codecs.floats import FLOATS, Bytes, Floats, as_floats, put_floats
from kvwire_store.codecs.base import BlockCodec, ImageForm

Halves: TypeAlias = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class ScaledCodec(BlockCodec):
    """Stores 8 bits per element, and float32 scales."""

    lossy: ClassVar[bool] = True

    def encode(self, image: Bytes, form: ImageForm, into: Bytes) -> int:
        head = _scales_bytes(form)
        nbytes = head + form.elements
        if form.dtype not in FLOATS or nbytes > into.size:
            return 0
        values = as_floats(image, form.dtype).reshape(form.shape)
        scale = scale_of(values, form.places("token", "dim"), self.name)
        if not np.isfinite(scale).all():
            return 0
        into[:head] = scale.reshape(-1).view(np.uint8)
        into[head:nbytes] = to_codes(values, scale, self.name).reshape(-1)
        return nbytes

    def decode(self, payload: Bytes, form: ImageForm, into: Bytes) -> None:
        head = _scales_bytes(form)
        _require(payload, form, head + form.elements)
        scale = payload[:head].view(np.float32).reshape(_scales_shape(form))
        values = of_codes(payload[head:].reshape(form.shape), self.name)
        with np.errstate(all="ignore"):
            values *= scale
        put_floats(values, form.dtype, into)


@dataclass(frozen=True, slots=True)
class NibbleCodec(BlockCodec):
    """Stores 4 bits per element, and two float16 numbers per group."""

    lossy: ClassVar[bool] = True

    def encode(self, image: Bytes, form: ImageForm, into: Bytes) -> int:
        nbytes = _nibbles_bytes(form)
        if form.dtype not in FLOATS or nbytes > into.size:
            return 0
        values = as_floats(image, form.dtype).reshape(form.shape)
        codes = np.empty(form.shape, np.uint8)
        at = 0
        for part, over in _components(form):
            found = _least_and_step(values[part], over)
            if found is None:
                return 0
            least, step = found
            part_codes = values[part] - least.astype(np.float32)
            part_codes /= step.astype(np.float32)
            np.rint(part_codes, out=part_codes)
            codes[part] = np.clip(part_codes, 0, INT4_MAX, out=part_codes)
            for numbers in found:
                into[at : at + numbers.nbytes] = numbers.reshape(-1).view(np.uint8)
                at += numbers.nbytes
        into[at:nbytes] = pack_nibbles(codes.reshape(-1))
        return nbytes

    def decode(self, payload: Bytes, form: ImageForm, into: Bytes) -> None:
        _require(payload, form, _nibbles_bytes(form))
        packed = payload[payload.size - (form.elements + 1) // 2 :]
        values = unpack_nibbles(packed, form.elements).reshape(form.shape)
        at = 0
        for part, over in _components(form):
            shape = _reduced(values[part].shape, over)
            size = math.prod(shape)
            halves = payload[at : at + 4 * size].view(np.float16).astype(np.float32)
            least, step = halves.reshape(2, *shape)
            with np.errstate(all="ignore"):
                values[part] *= step
                values[part] += least
            at += 4 * size
        put_floats(values, form.dtype, into)


_Part: TypeAlias = tuple[Any, ...]


def _components(form: ImageForm) -> list[tuple[_Part, int]]:
    """Return each component's part of an image, and the axis that its groups follow."""
    (kv,) = form.places("kv")
    count = form.shape[kv]
    parts: list[tuple[_Part, int]] = []
    for component in range(count):
        part = (*[slice(None)] * kv, slice(component, component + 1))
        is_key = count == 2 and component == 0
        (over,) = form.places("token" if is_key else "dim")
        parts.append((part, over))
    return parts


def _least_and_step(values: Floats, over: int) -> tuple[Halves, Halves] | None:
    """Return float16 numbers with ``least <= v <= least + 15 * step``, or None."""
    low = values.min(over, keepdims=True)
    high = values.max(over, keepdims=True)
    with np.errstate(all="ignore"):
        least = low.astype(np.float16)
        least = np.where(least > low, np.nextafter(least, -_INFINITE), least)
        wide = (high - least.astype(np.float32)) / np.float32(INT4_MAX)
        step = wide.astype(np.float16)
        step = np.where(step < wide, np.nextafter(step, _INFINITE), step)
    step[step == 0] = 1
    finite = np.isfinite(least).all() and np.isfinite(step).all()
    return (least, step) if finite else None


_INFINITE: Final = np.float16(np.inf)


def _nibbles_bytes(form: ImageForm) -> int:
    """Return the length of a payload: 4 bytes per group, then the packed codes."""
    groups = 0
    for _, over in _components(form):
        (kv,) = form.places("kv")
        groups += form.elements // form.shape[kv] // form.shape[over]
    return 4 * groups + (form.elements + 1) // 2


def _scales_shape(form: ImageForm) -> tuple[int, ...]:
    return _reduced(form.shape, *form.places("token", "dim"))


def _scales_bytes(form: ImageForm) -> int:
    return 4 * math.prod(_scales_shape(form))


def _reduced(shape: tuple[int, ...], *over: int) -> tuple[int, ...]:
    return tuple(1 if axis in over else size for axis, size in enumerate(shape))


def _require(payload: Bytes, form: ImageForm, nbytes: int) -> None:
    if form.dtype not in FLOATS or payload.size != nbytes:
        raise IntegrityError(
            f"the payload has {payload.size} bytes; {form.elements} elements of "
            f"{form.dtype} need {nbytes}"
        )
