"""Rounding by chance, for kernels and for jnp: the hash, whose equation is in ``replayssm_jax.rounding``, and its use."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.small_floats import BFLOAT16, FLOAT16, round_to

Array = jax.Array


def round_by_chance(state: Array, dtype: Any, noise: Array) -> Array:
    """float32 [...] to float16 or bfloat16, up where the noise [...] uint32 says so."""
    return lax.bitcast_convert_type(round_to(state, FLOAT16 if dtype == jnp.float16 else BFLOAT16, noise), dtype)


def request_stream(seed: int, request: Array) -> Array:
    """mix(mix(seed + 0x9E3779B9) ^ request) of the equation. int32 -> uint32"""
    return _mix(_mix(jnp.uint32((seed + 0x9E3779B9) % 2**32)) ^ request.astype(jnp.uint32))


def element_noise(stream: Array, position: Array, head: Array, element: Array) -> Array:
    """The rest of the equation, for elements v K + k. Shapes that broadcast; int32 but for uint32 streams and elements"""
    for part in (position, head):
        stream = _mix(stream ^ part.astype(jnp.uint32))
    return _mix(stream ^ _mix(element))


def _mix(x: Array) -> Array:
    """A bijection of uint32 in which every bit of x turns every bit of the result with a probability of about a half.

    Source: C. Wellons, Prospecting for hash functions (``lowbias32``).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
