"""The recurrence for a block of tokens at once, from a state and a few records that are never folded to form the present.

With G_i the cumulative log decay over the block, S the state just before it and A, P lower triangular:

    A_ij = beta_i exp(G_i - G_j) (k_i . k_j), i > j           U = (I + A)^{-1} [beta_i (v_i - S exp(G_i) k_i)]
    P_ij = exp(G_i - G_j) (k_j . q_i), i >= j                 o_i = S exp(G_i) q_i + sum_j P_ij u_j

and S itself is a checkpoint C decayed by its records' total, plus the records: S = C exp(R) + sum_l w_l (key_l exp(R_l))^T.

Every exponent is a sum of log decays over the tokens in between, never a difference of running sums: one token with a gate
of -1e4 would otherwise leave nothing of the digits of its neighbours' gates. A sum of terms <= 0 neither overflows nor cancels.

Arrays here are float32 with heads before time, as batched products like them: [B, H, T, ...].
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from replayssm_jax.state import Recurrence

Array = jax.Array

# Products of a channel gate within a block are formed directly, [i, j, K] at a time, for this many tokens at most; so many
# are solved for one after the other.
_DIRECT = 16


class Block(NamedTuple):
    """Tokens of a block, or records of the past. Dead entries hold zeros."""

    key: Array  # [B, G, T, K]
    update: Array  # [B, H, T, V] u of a record; beta-free v of what is still to be solved
    log_decay: Array  # [B, H, T] or [B, H, T, K]
    beta: Array | None = None  # [B, H, T] of what is still to be solved


def product(subscripts: str, *operands: Array) -> Array:
    """Einsum without TF32 or bfloat16 passes: these products feed the state."""
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def fold(recurrence: Recurrence, state: Array, records: Block) -> Array:
    """The state after records: S exp(R) + sum_l w_l (key_l exp(R_l))^T.

    Args:
        recurrence: which recurrence.
        state: [B, H, V, K] float32
        records: L records; raw ones are solved against this state first.

    Returns:
        [B, H, V, K] float32
    """
    records = solve(recurrence, state, records)
    total = jnp.exp(jnp.sum(records.log_decay, axis=2))
    later = jnp.exp(_sum_after(records.log_decay))
    if recurrence.gate == "head":
        weighted = jnp.swapaxes(records.update * later[..., None], 2, 3)
        return state * total[..., None, None] + product("bhvl,bhlk->bhvk", weighted, _widen(recurrence, records.key))
    decayed_key = _widen(recurrence, records.key) * later
    return state * total[..., None, :] + product("bhlv,bhlk->bhvk", records.update, decayed_key)


def run_block(recurrence: Recurrence, state: Array, past: Block | None, q: Array, tokens: Block) -> tuple[Array, Array]:
    """Outputs and updates of a block of tokens.

    Args:
        recurrence: which recurrence.
        state: checkpoint before the past records. [B, H, V, K] float32
        past: records between the checkpoint and the block, or None; raw ones are solved against this state first.
        q: queries. [B, G, T, K] float32
        tokens: keys, values, log decays and betas of the block.

    Returns:
        Outputs and updates u, both [B, H, T, V] float32.
    """
    past = None if past is None else solve(recurrence, state, past)
    readers = jnp.stack([q, tokens.key] if recurrence.delta_rule else [q], axis=2)  # [B, G, P, T, K]
    before = _read_past(recurrence, state, past, readers, tokens.log_decay)
    within = _decayed_products(recurrence, readers, tokens.key, tokens.log_decay)
    u = _updates(recurrence, tokens, before[:, :, -1], within[:, :, -1])
    return before[:, :, 0] + product("bhij,bhjv->bhiv", within[:, :, 0], u), u


def solve(recurrence: Recurrence, state: Array, records: Block) -> Block:
    """Raw records with the updates u that they have from this state, or records as they are if they hold u already.

    Args:
        recurrence: which recurrence.
        state: checkpoint before the records. [B, H, V, K] float32
        records: L of them, with beta where they are raw.
    """
    if records.beta is None:
        return records
    readers = records.key[:, :, None]
    before = _read_past(recurrence, state, None, readers, records.log_decay)
    within = _decayed_products(recurrence, readers, records.key, records.log_decay)
    return records._replace(update=_updates(recurrence, records, before[:, :, 0], within[:, :, 0]), beta=None)


def _updates(recurrence: Recurrence, tokens: Block, known: Array, within: Array) -> Array:
    """U = (I + A)^{-1} [beta_i (v_i - S exp(G_i) k_i)], from S exp(G_i) k_i and A without its beta; beta v elsewhere."""
    assert tokens.beta is not None
    beta = tokens.beta[..., None]
    u = beta * tokens.update
    if not recurrence.delta_rule:
        return u
    system = jnp.tril(beta * within, -1)  # its unit diagonal is implied
    return solve_unit_lower(system, u - beta * known)


def solve_unit_lower(system: Array, x: Array) -> Array:
    """(I + A)^{-1} x for a strictly lower triangular A, by forward substitution: 16 tokens one by one, blocks by products.

    XLA's own triangular solve is a library call that takes milliseconds a matrix where its threads have to wait for cores.

    Args:
        system: A. [B, H, T, T] float32
        x: [B, H, T, V] float32

    Returns:
        [B, H, T, V] float32; a token's solution does not depend on later tokens, whatever they hold.
    """
    solved: list[Array] = []
    for start in range(0, x.shape[2], _DIRECT):
        here = slice(start, start + _DIRECT)
        block = x[:, :, here]
        if solved:
            block = block - product("bhij,bhjv->bhiv", system[:, :, here, :start], jnp.concatenate(solved, axis=2))
        solved.append(_substitute(system[:, :, here, here], block))
    return jnp.concatenate(solved, axis=2)


def _substitute(system: Array, x: Array) -> Array:
    after = jnp.arange(x.shape[2])[:, None]

    def one(j: Array, x: Array) -> Array:
        solved = lax.dynamic_index_in_dim(x, j, 2)
        column = lax.dynamic_index_in_dim(system, j, 3)
        return x - jnp.where(after > j, column * solved, 0)

    return lax.fori_loop(0, x.shape[2] - 1, one, x, unroll=4) if x.shape[2] > 1 else x


def _read_past(recurrence: Recurrence, state: Array, past: Block | None, x: Array, log_decay: Array) -> Array:
    """S exp(G_i) x_i for P readers of each token, without forming S. x [B, G, P, T, K] -> [B, H, P, T, V]"""
    elapsed = lax.cumsum(log_decay, axis=2)[:, :, None]
    total = elapsed
    if past is not None:
        total = elapsed + jnp.sum(past.log_decay, axis=2)[:, :, None, None]
    if recurrence.gate == "head":
        out = _read_state(recurrence, state, x) * jnp.exp(total)[..., None]
    else:
        x = _widen(recurrence, x)
        out = _read_state(dataclasses.replace(recurrence, num_key_heads=recurrence.num_value_heads), state, x * jnp.exp(total))
    if past is None:
        return out
    later = jnp.exp(_sum_after(past.log_decay))
    if recurrence.gate == "head":
        weights = _widen(recurrence, product("bgptk,bglk->bgptl", x, past.key))
        weights = weights * jnp.exp(elapsed)[..., None] * later[:, :, None, None]
    else:
        weights = product("bhptk,bhlk->bhptl", x * jnp.exp(elapsed), _widen(recurrence, past.key) * later)
    return out + product("bhptl,bhlv->bhptv", weights, past.update)


def _read_state(recurrence: Recurrence, state: Array, x: Array) -> Array:
    """S x for P readers of each token of a key head, by every value head of it. x [B, G, P, T, K] -> [B, H, P, T, V]"""
    rows, groups, readers, tokens, key_dim = x.shape
    # one product of two flat matrices per key head: the form that XLA runs at the speed of reading the state
    flat = state.reshape(rows, groups, -1, key_dim)
    out = product("bgik,bgjk->bgij", x.reshape(rows, groups, -1, key_dim), flat)
    out = out.reshape(rows, groups, readers, tokens, recurrence.group_size, -1)
    return jnp.moveaxis(out, 4, 2).reshape(rows, recurrence.num_value_heads, readers, tokens, -1)


def _decayed_products(recurrence: Recurrence, x: Array, key: Array, log_decay: Array) -> Array:
    """exp(G_i - G_j) (x_i . key_j) for i >= j, zero above, for P readers of each token. x [B, G, P, T, K] -> [B, H, P, T, T]"""
    if recurrence.gate == "head":
        dots = product("bgpik,bgjk->bgpij", x, key)  # once per key head
        return _widen(recurrence, dots) * jnp.exp(_sum_between(log_decay))[:, :, None]
    x, key = _widen(recurrence, x), _widen(recurrence, key)
    tokens = key.shape[2]
    rows = []
    for start in range(0, tokens, _DIRECT):
        here = slice(start, min(start + _DIRECT, tokens))
        gate, reader = log_decay[:, :, here], x[..., here, :]
        decayed_key = key[:, :, None, here] * jnp.exp(_sum_between(gate))  # [B, H, i, j, K]
        near = jnp.sum(reader[..., None, :] * decayed_key[:, :, None], axis=-1)
        # tokens before this piece: the gates up to its start and from its start on are two factors <= 1
        up_to = jnp.exp(_sum_after(log_decay[:, :, :start]))
        since = jnp.exp(lax.cumsum(gate, axis=2))[:, :, None]
        far = product("bhpik,bhjk->bhpij", reader * since, key[:, :, :start] * up_to)
        above = jnp.zeros((*near.shape[:-1], tokens - here.stop), near.dtype)
        rows.append(jnp.concatenate([far, near, above], axis=-1))
    return jnp.concatenate(rows, axis=-2)


def _sum_between(log_decay: Array) -> Array:
    """Sum of the log decays of tokens j+1 .. i, -inf where j > i. [B, H, T, ...] -> [B, H, i, j, ...]"""
    tokens = log_decay.shape[2]
    index = jnp.arange(tokens)
    shape = (tokens, tokens) + (1,) * (log_decay.ndim - 3)
    after = (index[:, None] > index[None, :]).reshape(shape)
    sums = lax.cumsum(jnp.where(after, log_decay[:, :, :, None], 0.0), axis=2)
    return jnp.where((index[:, None] >= index[None, :]).reshape(shape), sums, -jnp.inf)


def _sum_after(log_decay: Array) -> Array:
    """Sum of the log decays of the entries after each one. [B, H, L, ...] -> same shape"""
    later = jnp.concatenate([log_decay[:, :, 1:], jnp.zeros_like(log_decay[:, :, :1])], axis=2)
    return lax.cumsum(later[:, :, : log_decay.shape[2]], axis=2, reverse=True)


def _widen(recurrence: Recurrence, x: Array) -> Array:
    """Key heads repeated for the value heads that use them. [B, G, ...] -> [B, H, ...]"""
    return jnp.repeat(x, recurrence.group_size, axis=1)
