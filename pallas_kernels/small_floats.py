"""Rounding of float32 to smaller floats in integer arithmetic: the same bits on every backend, to nearest or by chance."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

NOT_FINITE = 0x7F800000  # a float32's magnitude from here on is infinite or NaN


class SmallFloat(NamedTuple):
    """A binary format: sign, exponent and mantissa, with subnormals. Patterns are those of magnitudes."""

    width: int  # bits in all
    mantissa: int  # bits
    bias: int  # of the exponent
    largest: int  # pattern of the largest finite value
    nan: int  # pattern


FLOAT16 = SmallFloat(width=16, mantissa=10, bias=15, largest=0x7BFF, nan=0x7E00)
BFLOAT16 = SmallFloat(width=16, mantissa=7, bias=127, largest=0x7F7F, nan=0x7FC0)
E4M3 = SmallFloat(width=8, mantissa=3, bias=7, largest=0x7E, nan=0x7F)  # no infinities


# Of the read-out formats, whose scales and codes kernels and jnp must choose alike. Magnitudes are bits of a float32.
LARGEST_SCALED = (127 + 127) << 23  # 2^127: what is rounded up from there is still a float32
LEAST_SCALE = 127 - 110  # exponent field; scale, block scale and their product stay normal numbers
SCALE_BLOCK = 16  # columns under one block scale of nvfp4
# e2m1 codes 0..6 end halfway to the next: the even one of two takes the tie
E2M1_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def upper_half(bits: Array) -> Array:
    """A float32's bits without the lower 16, as the nearest bfloat16's: what is above them, one more from the middle on."""
    return (bits + 0x8000) >> 16 & 0xFFFF


def join_halves(upper: Array, lower: Array) -> Array:
    """A float32's bits from ``upper_half`` and the lower 16. Integers of 32 bits, as is the result."""
    return (upper - (lower >> 15)) << 16 | lower


def magnitude_bits(x: Array) -> Array:
    """Bits of |x|; as integers they are ordered like the magnitudes. float32 -> uint32"""
    return lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF


def finite(magnitude: Array) -> Array:
    """Whether ``magnitude_bits`` are those of a finite number. uint32 -> bool"""
    return magnitude < NOT_FINITE


def round_to(x: Array, target: SmallFloat, noise: Array | None = None) -> Array:
    """Patterns of x in a smaller format, subnormals included; saturates at its largest finite value, keeps sign and NaN.

    With q the distance between neighbours of the format around x:

        q floor(|x| / q + 1/2)          ties to the even pattern, without noise
        q floor(|x| / q + n / 2^32)     with noise n, of which as many leading bits are used as x loses: up to 31 of them

    Args:
        x: [...] float32
        target: the format.
        noise: None for rounding to nearest, or uniform bits, which make every rounding unbiased. [...] uint32

    Returns:
        [...] uint8 or uint16, to be bitcast to the format's dtype.
    """
    magnitude = magnitude_bits(x)
    field = magnitude >> 23
    exponent = jnp.maximum(field, 1)  # subnormal float32s share the smallest exponent
    significand = (magnitude & 0x7FFFFF) | jnp.where(field > 0, jnp.uint32(1 << 23), jnp.uint32(0))
    smallest = jnp.uint32(128 - target.bias)  # exponent field of the format's smallest normal number
    lost = (23 - target.mantissa) + jnp.maximum(smallest, exponent) - exponent
    drop = jnp.minimum(lost, 31)  # a significand has 24 bits, so what else is lost is far below half of q
    significand = lax.shift_right_logical(significand, jnp.minimum(lost - drop, 31))
    if noise is None:
        up = (jnp.uint32(1) << (drop - 1)) - 1 + (lax.shift_right_logical(significand, drop) & 1)
    else:
        up = lax.shift_right_logical(noise, 32 - drop)
    quanta = lax.shift_right_logical(significand + up, drop)
    # a carry out of the mantissa lands in the exponent, where it belongs
    pattern = quanta + ((jnp.maximum(smallest, exponent) - smallest) << target.mantissa)
    pattern = jnp.where(magnitude > NOT_FINITE, target.nan, jnp.minimum(pattern, target.largest))
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> 31) << (target.width - 1)
    return (pattern | sign).astype(np.dtype(f"uint{target.width}"))
