"""The law: one token at a time, as the equation reads. Never optimised; every fast path answers to it.

S_t = S_{t-1} * alpha_t + u_t k_t^T
u_t = beta_t * (v_t - [delta_rule] * (S_{t-1} * alpha_t) k_t)
o_t = S_t q_t
"""

import jax
import jax.numpy as jnp

from replayssm_jax.state import Recurrence, Tokens

Array = jax.Array


def recurrent_token(recurrence: Recurrence, state: Array, token: Tokens) -> tuple[Array, Array, Array]:
    """One token of every row.

    Args:
        recurrence: which recurrence.
        state: S_{t-1}. [B, H, V, K] float32
        token: Tokens without their time axis: q, k [B, G, K], v [B, H, V], log_decay [B, H] or [B, H, K], beta [B, H].

    Returns:
        S_t [B, H, V, K], u_t [B, H, V] and o_t [B, H, V], all in the state's dtype.
    """
    q = to_value_heads(recurrence, scaled(token.q, token.q_scale))  # [B, H, K]
    k = to_value_heads(recurrence, scaled(token.k, token.k_scale))  # [B, H, K]
    alpha = jnp.exp(token.log_decay)
    alpha = alpha[..., None, None] if recurrence.gate == "head" else alpha[..., None, :]
    decayed = state * alpha
    known = jnp.sum(decayed * k[..., None, :], axis=-1) if recurrence.delta_rule else 0.0
    u = token.beta[..., None] * (token.v.astype(jnp.float32) - known)
    state = decayed + u[..., :, None] * k[..., None, :]
    return state, u, jnp.sum(state * q[..., None, :], axis=-1)


def recurrent(recurrence: Recurrence, state: Array, tokens: Tokens, live: Array) -> tuple[Array, Array, Array]:
    """T tokens of every row, in order; a token that is not live changes nothing and outputs zero.

    Args:
        recurrence: which recurrence.
        state: [B, H, V, K] float32
        tokens: T tokens of B rows.
        live: [B, T] bool

    Returns:
        The state after the last live token [B, H, V, K], u [B, T, H, V] and the outputs [B, T, H, V], all float32.
    """

    def token(state, inputs):
        token, live = inputs
        after, u, out = recurrent_token(recurrence, state, token)
        keep = live[:, None, None]
        return jnp.where(keep[..., None], after, state), (jnp.where(keep, u, 0), jnp.where(keep, out, 0))

    time_first = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (tokens, live))
    state, (u, out) = jax.lax.scan(token, state, time_first)
    return state, jnp.swapaxes(u, 0, 1), jnp.swapaxes(out, 0, 1)


def scaled(x: Array, scale: Array | None) -> Array:
    """A raw query or key times its factor, in float32. [..., G, K]"""
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale[..., None]


def to_value_heads(recurrence: Recurrence, x: Array) -> Array:
    """Key heads repeated for the value heads that use them: value head h takes key head h // (H // G). [..., H, K]"""
    return jnp.repeat(x, recurrence.group_size, axis=-2)
