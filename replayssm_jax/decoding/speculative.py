"""Which drafts to keep: speculative decoding that leaves the model's distribution as it is.

With p_i what the model draws token i from and q_i what the drafter drew draft d_i from,

    keep d_i with probability min(1, p_i(d_i) / q_i(d_i)); at the first one not kept draw from max(p_i - q_i, 0) / its sum,
    and behind the last draft from p

(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023). A drafter that chooses without drawing
has all of q_i on d_i. Then the rule is the same as drawing x_i from p_i and keeping d_i where it equals x_i, which is what is
done here: its tokens are those of plain decoding, draw for draw, as long as the model's logits are. A pass over several tokens
rounds otherwise than passes over one: in float32 that hardly ever changes a token, in bfloat16 it does.
"""

import jax
import jax.numpy as jnp
from jax import lax

from replayssm_jax.decoding.sampling import ACCEPT, draw, token_keys

Array = jax.Array


def choose(
    targets: Array, drafts: Array, counts: Array, proposals: Array | None, seed: Array, position: Array
) -> tuple[Array, Array]:
    """The tokens that follow each row's text: kept drafts, and one token of the model's own behind them.

    Args:
        targets: what the model draws from after the row's text and after each draft, unnormalised logs. [N, T, V] float32
        drafts: [N, T - 1] int32
        counts: drafts of each row, 0..T-1. [N] int32
        proposals: what the drafts were drawn from, unnormalised logs, or None where they were chosen. [N, T - 1, V] float32
        seed: of the rows' requests. [N] uint32
        position: in its text of the first token to choose. [N] int32

    Returns:
        The tokens [N, T] int32, garbage past a row's; and how many drafts are kept. [N] int32
    """
    num_tokens = targets.shape[1]
    keys = token_keys(seed, position[:, None] + jnp.arange(num_tokens))
    is_draft = jnp.arange(num_tokens - 1) < counts[:, None]
    if proposals is None:
        tokens = _draw_or_best(targets, keys)
        kept = tokens[:, :-1] == drafts
    else:
        log_p, log_q = jax.nn.log_softmax(targets, axis=-1), jax.nn.log_softmax(proposals, axis=-1)
        p_draft, q_draft = (jnp.take_along_axis(x, drafts[..., None], axis=-1)[..., 0] for x in (log_p[:, :-1], log_q))
        toss = token_keys(seed, position[:, None] + jnp.arange(num_tokens - 1), ACCEPT)
        uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(toss)
        # 1 - uniform lies in (0, 1]: a draft that the model never draws is never kept
        kept = jnp.log1p(-uniform) <= p_draft - q_draft
        rest = jnp.log(jnp.maximum(jnp.exp(log_p[:, :-1]) - jnp.exp(log_q), 0))
        # p and q equal up to rounding leave nothing, and then the draft is as good as certain to be kept
        rest = jnp.where(jnp.isfinite(rest).any(axis=-1, keepdims=True), rest, log_p[:, :-1])
        rest = jnp.where(is_draft[..., None], rest, log_p[:, :-1])
        own = _draw_or_best(jnp.concatenate([rest, log_p[:, -1:]], axis=1), keys)
        tokens = own.at[:, :-1].set(jnp.where(kept & is_draft, drafts, own[:, :-1]))
    accepted = jnp.cumprod(kept & is_draft, axis=1).sum(axis=1)
    return tokens, accepted.astype(jnp.int32)


def _draw_or_best(logits: Array, keys: Array) -> Array:
    """``draw``, without its noise where every distribution leaves one token only. [N, T, V] -> [N, T] int32"""
    certain = (jnp.isfinite(logits).sum(axis=-1) <= 1).all()
    return lax.cond(certain, lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32), lambda: draw(logits, keys))
