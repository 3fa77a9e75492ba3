"""Takes queries back through tokens and records: see ``read`` for the equations.

A warp takes all queries of a value head. What it has of them is an array over rows i R + h, of token i and head h of R.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import decode, digits, warps
from pallas_kernels.hopper.cut import (
    BETA,
    K_SCALE,
    LOG_DECAY,
    Q_SCALE,
    columns_of,
    keeps_direction,
    planes_of,
    sources_come_late,
    takes_digits,
)
from pallas_kernels.hopper.place import Place
from pallas_kernels.hopper.records import RING_CHUNK
from pallas_kernels.hopper.tiles import (
    Array,
    Ref,
    along,
    barrier,
    f32,
    i32,
    iota,
    split,
    split_exactly,
    store,
)
from pallas_kernels.small_floats import NOT_FINITE

f16 = jnp.float16


def take_back(place: Place) -> None:
    """Fills "trace" with the weights w_j by ring row, behind those the tokens', and the planes or digits with x_0.

    Queries past the row's length take back what may be anything, and are read by nobody.
    """
    g, s, ring, layout = place.g, place.s, place.ring, place.layout.reduce(1)
    x = _rows(place, s["queries"]) * _along(_token_numbers(place, Q_SCALE, 0, g.tokens), place)

    def token(j: Any, x: Array) -> Array:
        i = g.tokens - 1 - j
        key = _rows(place, s["token_keys"].at[pl.ds(i, 1)])
        beta, factor = (_token_numbers(place, kind, i) for kind in (BETA, K_SCALE))
        before = _back(place, x, key, _token_gate(place, i), beta, factor, g.window + i)
        if g.tokens == 1:
            return before
        sees = iota((place.readers,), 0, layout) >= i * place.config.heads
        return jnp.where(_along(sees, place), before, x)

    def record(j: Array, x: Array) -> Array:
        row = ring.row(ring.count - 1 - j)
        key, beta = _ring_row(place, "keys", row), _column(place, "weights", row)
        factor = _column(place, "factors", row) if g.delta_rule else None
        decay = _ring_row(place, "decays", row) if g.channel_gate else _column(place, "decays", row)
        return _back(place, x, key, jnp.exp(decay), beta, factor, row)

    x = lax.fori_loop(0, g.tokens, token, x) if g.tokens > 1 else token(0, x)
    if place.folded:
        _store_planes(place, x)
    elif keeps_direction(g):
        _store_planes(place, x, _decay_back(place))
    else:
        x = lax.fori_loop(0, ring.count, record, x)
        if g.channel_gate or sources_come_late(g):
            barrier()  # planes lie where keys and decays were
        _store_planes(place, x)
    plgpu.commit_smem()  # the tensor cores read the planes


def _decay_back(place: Place) -> Array:
    """``take_back`` through the records where only a head gate changes x: what remains of it. [R]"""
    s, ring = place.s, place.ring

    @pl.when(ring.count > 0)
    def _():
        query = warps.load_rows(s["queries"], RING_CHUNK, RING_CHUNK, place.interpret).astype(f32) * s["numbers"][Q_SCALE, 0, 0]
        for i in range(place.g.window // RING_CHUNK):
            keys = warps.load_rows(s["keys"].at[i], RING_CHUNK, RING_CHUNK, place.interpret).astype(f32)
            store(s["dots"].at[pl.ds(i * RING_CHUNK, RING_CHUNK)], jnp.sum(keys * query, axis=1))
        barrier()

    def one(j: Array, remains: Array) -> Array:
        row = ring.row(ring.count - 1 - j)
        _trace(place, row, _column(place, "weights", row) * (gate * remains) * s["dots"][row])
        return remains * jnp.exp(_column(place, "decays", row))

    gate = _token_gate(place, 0)
    return lax.fori_loop(0, ring.count, one, jnp.ones_like(gate))


def _back(place: Place, x: Array, key: Array, gate: Array, beta: Array, factor: Array | None, source: Any) -> Array:
    """x before a token or record, whose weights are kept; gate a number or by channel; the key's factor None if beta has it."""
    weight = jnp.sum(x * key, axis=1) * (beta if factor is None else beta * factor)
    _trace(place, source, weight)
    if factor is not None and place.g.delta_rule:
        x = x - _along(weight * factor, place) * key
    return x * (gate if place.g.channel_gate else _along(gate, place))


def _trace(place: Place, source: Any, weight: Array) -> None:
    """Keeps a source's weights."""
    column = place.s["trace"].at[:, :, pl.ds(source, 1)]
    _store_numbers(place, column, weight)


def _store_numbers(place: Place, ref: Ref, x: Array) -> None:
    """Numbers by head and token, or of one token by the columns that heads are."""
    warps.store_column(ref, x, place.layout.reduce(1), place.planes, place.interpret)


def _along(x: Array, place: Place) -> Array:
    return along(x, (place.readers, place.g.key_dim), 0)


def _rows(place: Place, ref: Ref) -> Array:
    """Rows of heads' or key heads' vectors [t, n, K]. [rows, K] float32"""
    return warps.load_rows(ref, place.readers, place.config.heads, place.interpret).astype(f32)


def _ring_row(place: Place, name: str, row: Array) -> Array:
    """The same of a ring row."""
    return _rows(place, place.s[name].at[pl.ds(row // RING_CHUNK, 1), :, row % RING_CHUNK])


def _numbers(place: Place, ref: Ref) -> Array:
    """Numbers [n, t] of heads or key heads. [rows]"""
    return warps.load_column(ref, place.readers, place.config.heads, place.layout.reduce(1), place.interpret)


def _column(place: Place, name: str, row: Array) -> Array:
    """The same of a ring row."""
    return _numbers(place, place.s[name].at[:, pl.ds(row, 1)])


def _token_numbers(place: Place, kind: int, first: Any, count: int = 1) -> Array:
    """The same of a token, or of each."""
    heads = place.key_heads if kind in (Q_SCALE, K_SCALE) else place.config.heads
    return _numbers(place, place.s["numbers"].at[kind, pl.ds(0, heads), pl.ds(first, count)])


def _token_gate(place: Place, i: Any) -> Array:
    if not place.g.channel_gate:
        return jnp.exp(_token_numbers(place, LOG_DECAY, i))
    return jnp.exp(_rows(place, place.s["gates"].at[pl.ds(i, 1)]))


def _store_planes(place: Place, x: Array, remains: Array | None = None) -> None:
    """x times ``remains`` as the tensor cores multiply it, in the order of the tile's columns, and its factor.

    That is as digits, or as the sum of planes of 16 bits. The factor takes what remains of x, and but for planes of bfloat16 a
    power of two, so that they hold x.
    """
    g, s, (count, dtype) = place.g, place.s, planes_of(place.g)
    if takes_digits(g):
        x, factor = _over_power(x, digits.UNIT / 2)
        digits.store(s["digits"], x, place.interpret)
    else:
        if dtype == f16:
            x, factor = _over_power(x, 1.0)
            factor = factor * (1 / decode.UNIT.get(g.readout, 1.0))
            high = x.astype(f16)
            terms: Any = (high, (x - high.astype(f32)).astype(f16))
        else:
            factor = plgpu.layout_cast(jnp.ones((place.readers,), f32), place.layout.reduce(1))
            terms = split_exactly(x) if count == 3 else split(x, nearest=True)
        for i, term in enumerate(terms):
            decode.store_plane(g.readout, s["planes"], i * columns_of(g), term, place.planes, place.interpret)
    factor = factor if remains is None else factor * remains
    _store_numbers(place, s["scales"], factor)


def _over_power(x: Array, scale: float) -> tuple[Array, Array]:
    """Rows of x over a power of two, so that their largest magnitude is below 2, times ``scale``, and this power.

    The power is NaN where x is not finite. Rows below 2^-87 share it with greater ones.
    """
    field = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1), i32) & NOT_FINITE
    power = jnp.minimum(jnp.maximum(field, 40 << 23), 252 << 23)
    inverse = lax.bitcast_convert_type((254 << 23) - power, f32) * scale
    power = jnp.where(field == NOT_FINITE, jnp.nan, lax.bitcast_convert_type(power, f32))
    return x * along(inverse, x.shape, 0), power
