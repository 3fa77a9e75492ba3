"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp

Array = jax.Array


def sample(logits: Array, keys: Array, *, temperature: float, top_p: float = 1.0) -> Array:
    """One token per row: the most likely one at temperature 0, else a draw from the nucleus.

    Args:
        logits: [B, vocabulary] float32
        keys: one typed PRNG key per row, so that a row's draws do not depend on its batch. [B]
        temperature: static, 0 for greedy; otherwise divides the logits.
        top_p: static, in (0, 1]; draws only from the fewest most likely tokens whose probabilities sum to at least this.

    Returns:
        [B] int32

    Raises:
        ValueError: temperature or top_p is out of range.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # relative to the best: a tiny temperature must not turn infinity minus infinity into NaN
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_p < 1:
        order = jnp.argsort(-logits, axis=-1)
        ranked = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(ranked, axis=-1) - ranked
        kept = jnp.zeros(logits.shape, bool)
        kept = kept.at[jnp.arange(logits.shape[0])[:, None], order].set(before < top_p)
        logits = jnp.where(kept, logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def row_keys(seed: int, rows: Array, position: Array) -> Array:
    """Keys for the tokens at ``position`` [B] of requests ``rows`` [B]: the same whatever else is in the batch. [B]"""
    base = jax.random.key(seed)
    return jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(base, row), at))(rows, position)
