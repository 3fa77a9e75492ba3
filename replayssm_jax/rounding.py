"""The one rounding of a fold: a float32 state to the checkpoint's dtype, to nearest or by chance.

Chance is a hash of what is being rounded, not of where: with ``mix`` a bijection of 32-bit integers and arithmetic mod 2^32,

    stream  = mix(mix(mix(mix(seed + 0x9E3779B9) ^ request) ^ position) ^ head)
    noise   = mix(stream ^ mix(v * K + k))

for element [v, k] of a value head, where ``request`` is the slot's id in the pointer and ``position`` the tokens folded into
the checkpoint, those of this fold included. It knows no slot, batch row or device: a request is rounded in the same way
wherever it runs, and again after its slot has been copied.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.chance import element_noise, request_stream, round_by_chance
from replayssm_jax.policy import ReplayPolicy

Array = jax.Array


def round_checkpoint(state: Array, policy: ReplayPolicy, request: Array, position: Array, first_head: Array | int = 0) -> Array:
    """A float32 state as its checkpoint will hold it. Saturates at the dtype's largest finite value, keeps NaN.

    Args:
        state: [B, H, V, K] float32
        policy: has checkpoint_dtype, rounding and seed.
        request: the pointer's, of each row. [B] int32
        position: tokens that the state has seen. [B] int32
        first_head: number of the state's first value head, where it holds a device's share of them. int32

    Returns:
        [B, H, V, K] checkpoint_dtype
    """
    dtype = policy.checkpoint_dtype
    if dtype == jnp.float32:
        return state
    if policy.rounding == "nearest":
        limit = float(jnp.finfo(dtype).max)
        return jnp.clip(state, -limit, limit).astype(dtype)
    _, heads, values, keys = state.shape
    noise = checkpoint_noise(policy.seed, request, position, first_head + jnp.arange(heads), values * keys)
    return round_by_chance(state, dtype, noise.reshape(state.shape))


def checkpoint_noise(seed: int, request: Array, position: Array, heads: Array, count: int) -> Array:
    """Uniform bits for ``count`` elements of every row and head, by the equation above.

    Args:
        seed: 0 to 2**32 - 1.
        request, position: [B] int32
        heads: numbers of the value heads. [H] int32
        count: V * K

    Returns:
        [B, H, count] uint32
    """
    stream = request_stream(seed, request)[:, None, None]
    return element_noise(stream, position[:, None, None], heads[:, None], jnp.arange(count, dtype=jnp.uint32))
