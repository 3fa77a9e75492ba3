"""Read-out copies: a checkpoint in fewer bytes, for ordinary reads. Formats, bit for bit.

A checkpoint [..., V, K] (float32, or widened to it) becomes a ``Readout``; ``...`` is slots and heads. Small floats are kept
as their bit patterns, in integers, which no backend widens on the way; NumPy's ``.view`` of the dtype in ``ml_dtypes`` reads
them. All scales of type float32 are powers of two, so that scaling rounds nothing; a scale of 0 stands for zeros. ``rne`` is
rounding to nearest, ties to the even pattern, saturating at the format's largest finite value.

    bf16       payload [..., V, K] uint16
               value = bfloat16(payload)
    fp8_e4m3   payload [..., V, K] uint8, scale [..., V] float32
               value[v, k] = float8_e4m3fn(payload[v, k]) * scale[v]
               scale[v]   = least 2^e with max_k |x[v, k]| <= 448 * 2^e
               payload    = rne(x / scale)
    bf16_plane payload [..., V, K] uint16, and of the checkpoint only what is not in it is kept, also [..., V, K] uint16:
               payload    = (bits(x) + 2^15) >> 16 mod 2^16, so bfloat16(payload) is x rounded to nearest, ties away from zero
               checkpoint = bits(x) mod 2^16, so bits(x) = (payload - (checkpoint >> 15)) * 2^16 + checkpoint mod 2^32
    nvfp4      payload [..., V, ceil(K / 16) * 8] uint8, block_scale [..., V, ceil(K / 16)] uint8, scale [...] float32
               value[v, k] = e2m1(payload[v, k // 2] >> 4 * (k % 2) & 15) * float8_e4m3fn(block_scale[v, k // 16]) * scale
               scale       = least 2^e with max_vk |x[v, k]| <= 6 * 448 * 2^e
               block_scale = rne(max |x| of the block / scale * float32(1 / 6)), the product in float32
               code        = rne(x / (scale * block_scale)), with neither quotient nor product rounded

An even column is the low nibble of its byte. A nibble is a sign bit above a magnitude code 0..7 of 0, 0.5, 1, 1.5, 2, 3, 4, 6.
Key dims that are no multiple of 16 are padded with zeros, which no scale notices. Also:

- zero encodes to zero bytes; -0 keeps its sign, but for a block of nvfp4 with a scale of 0, whose codes are all 0;
- no e is below -110, and magnitudes above 2^127 are taken as 2^127; a maximum below 2^-126 is taken as 0;
- a number that is not finite enters no scale and reads as NaN: by itself in bf16 and fp8_e4m3, with its block of 16 in nvfp4;
  in a bf16_plane it reads as it is.

A bf16_plane is no copy: together with the rest it is the float32 checkpoint, bit for bit (a NaN becomes bits 0x7FC00000), in no
more memory than that. Finite numbers that round past bfloat16's largest read as infinite in it; a copy in bf16 saturates.

Scales belong to one slot and head (nvfp4) or row of it (fp8_e4m3): no slot, padding or dead record enters another's.
Source: OCP 8-bit floating point and OCP microscaling formats (e4m3, e2m1); NVFP4's blocks of 16 under two scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.small_floats import (
    BFLOAT16,
    E2M1_HALFWAY,
    E4M3,
    LARGEST_SCALED,
    LEAST_SCALE,
    SCALE_BLOCK,
    finite,
    join_halves,
    magnitude_bits,
    round_to,
    upper_half,
)
from replayssm_jax.trees import register

Array = jax.Array

PLANE = "bf16_plane"
FORMATS = ("bf16", PLANE, "fp8_e4m3", "nvfp4")


@register(("payload", "scale", "block_scale"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Readout:
    """A checkpoint encoded for reading. Shapes and dtypes by format, see above.

    Attributes:
        payload: one code per value; nvfp4 packs two into a byte.
            [N, H, V, K] uint16 or uint8, or [N, H, V, ceil(K / 16) * 8] uint8
        scale: None for bf16 and bf16_plane. [N, H, V] or [N, H] float32
        block_scale: nvfp4 only. [N, H, V, ceil(K / 16)] uint8
    """

    payload: Array
    scale: Array | None = None
    block_scale: Array | None = None


def encode(form: str, x: Array) -> Readout:
    """Encodes a checkpoint.

    Args:
        form: one of FORMATS.
        x: [..., V, K] float32, bfloat16 or float16

    Returns:
        Its copy in that format; a pure function of x, the same bits on every backend.

    Raises:
        ValueError: no format has this name.
    """
    _check_format(form)
    x = x.astype(jnp.float32)
    return {"bf16": _encode_bf16, PLANE: _encode_plane, "fp8_e4m3": _encode_fp8, "nvfp4": _encode_nvfp4}[form](x)


def decode(form: str, copy: Readout, key_dim: int) -> Array:
    """What an encoded checkpoint reads as.

    Args:
        form: the format it was encoded in.
        copy: from ``encode``.
        key_dim: K.

    Returns:
        [..., V, K] float32

    Raises:
        ValueError: no format has this name.
    """
    _check_format(form)
    if form in ("bf16", PLANE):
        return _widen(copy.payload, jnp.bfloat16)
    assert copy.scale is not None
    if form == "fp8_e4m3":
        return _widen(copy.payload, jnp.float8_e4m3fn) * copy.scale[..., None]
    assert copy.block_scale is not None
    nibbles = jnp.stack([copy.payload & 15, copy.payload >> 4], axis=-1).reshape(*copy.block_scale.shape, SCALE_BLOCK)
    scale = _widen(copy.block_scale, jnp.float8_e4m3fn) * copy.scale[..., None, None]
    values = _e2m1(nibbles) * scale[..., None]
    return values.reshape(*copy.payload.shape[:-1], -1)[..., :key_dim]


def _encode_bf16(x: Array) -> Readout:
    codes = jnp.where(finite(magnitude_bits(x)), round_to(x, BFLOAT16), BFLOAT16.nan)
    return Readout(payload=codes.astype(jnp.uint16))


def _encode_plane(x: Array) -> Readout:
    return Readout(payload=upper_half(_bits(x)).astype(jnp.uint16))


def lower_plane(x: Array) -> Array:
    """What a checkpoint has beside its bf16_plane. float32 -> uint16"""
    return _bits(x).astype(jnp.uint16)


def join_planes(upper: Array, lower: Array) -> Array:
    """The checkpoint from its bf16_plane and ``lower_plane``, bit for bit. uint16 each -> float32"""
    return _float(join_halves(upper.astype(jnp.uint32), lower.astype(jnp.uint32)))


def _bits(x: Array) -> Array:
    """All NaN alike: one whose bits are all ones would round up to zero."""
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), jnp.uint32)


def _encode_fp8(x: Array) -> Readout:
    magnitude = magnitude_bits(x)
    scale, inverse = _power_of_two_scale(jnp.max(_counted(magnitude), axis=-1), 448.0)
    largest = _float(jnp.uint32(LARGEST_SCALED))
    codes = round_to(jnp.clip(x, -largest, largest) * inverse[..., None], E4M3)
    return Readout(payload=jnp.where(finite(magnitude), codes, E4M3.nan).astype(jnp.uint8), scale=scale)


def _encode_nvfp4(x: Array) -> Readout:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % SCALE_BLOCK)])
    x = x.reshape(*x.shape[:-1], -1, SCALE_BLOCK)  # [..., V, blocks, 16]
    magnitude = magnitude_bits(x)
    counted = _counted(magnitude)
    largest = jnp.max(counted, axis=-1)  # [..., V, blocks]
    scale, inverse = _power_of_two_scale(jnp.max(largest, axis=(-2, -1)), 6.0 * 448.0)
    sixth = _float(largest) * inverse[..., None, None] * jnp.float32(1 / 6)
    codes = jnp.where(jnp.all(finite(magnitude), axis=-1), round_to(sixth, E4M3), E4M3.nan)
    block_scale = codes.astype(jnp.uint8)

    unit = (_widen(block_scale, jnp.float8_e4m3fn) * scale[..., None, None])[..., None]
    size = _float(counted)
    # comparing with halfway points, which are exact, rounds as an exact quotient would
    past = [size > unit * half if code % 2 == 0 else size >= unit * half for code, half in enumerate(E2M1_HALFWAY)]
    code = jnp.sum(jnp.stack(past), axis=0, dtype=jnp.uint8)
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> 31).astype(jnp.uint8)
    nibbles = jnp.where(unit > 0, code | (sign << 3), 0)  # a unit of NaN says all there is to say
    low, high = jnp.moveaxis(nibbles.reshape(*nibbles.shape[:-2], -1, 2), -1, 0)
    return Readout(payload=low | (high << 4), scale=scale, block_scale=block_scale)


def _counted(magnitude: Array) -> Array:
    """Magnitudes as a scale sees them, in bits: what is not finite counts as zero, nothing as more than 2^127."""
    return jnp.where(finite(magnitude), jnp.minimum(magnitude, LARGEST_SCALED), 0)


def _power_of_two_scale(magnitude: Array, largest: float) -> tuple[Array, Array]:
    """The least 2^e, e >= -110, with ``magnitude <= largest * 2^e``, and 2^-e; 0 and 0 for zero. Bits in, float32 out."""
    top, top_fraction = divmod(int(np.float32(largest).view(np.uint32)), 1 << 23)
    field, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    exponent = field + 127 + (fraction > top_fraction)
    exponent = jnp.maximum(exponent, top + LEAST_SCALE) - top
    scale, inverse = (_float(jnp.where(field > 0, bits << 23, 0)) for bits in (exponent, 254 - exponent))
    return scale, inverse


def _e2m1(nibbles: Array) -> Array:
    """Values of e2m1 codes. uint8 -> float32"""
    exponent, mantissa = (nibbles >> 1) & 3, nibbles & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    size = halves.astype(jnp.float32) * 0.5
    return jnp.where(nibbles & 8, -size, size)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _widen(patterns: Array, dtype: Any) -> Array:
    """Numbers of a small float's patterns. uint8 or uint16 -> float32"""
    return lax.bitcast_convert_type(patterns, dtype).astype(jnp.float32)


def _check_format(form: str) -> None:
    if form not in FORMATS:
        raise ValueError(f"form must be one of {', '.join(FORMATS)}, got {form!r}")
