"""Takes queries back through tokens and records: see ``read`` for the equations."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import decode
from pallas_kernels.hopper.place import Place, columns_of, keeps_direction, planes_of
from pallas_kernels.hopper.readers import SOURCES
from pallas_kernels.hopper.tiles import (
    STATE,
    VALUES,
    Array,
    Ref,
    along,
    barrier,
    f32,
    i32,
    iota,
    load,
    records_layout,
    split,
    split_exactly,
    store,
)

f16 = jnp.float16


def take_back(place: Place, head: Array) -> None:
    """Fills "trace" with the weights w_j by ring row, behind those the tokens', and the planes with x_0.

    Args:
        head: the first value head of them, counted from the warpgroup's first.
    """
    g, s, ring, shape = place.g, place.s, place.ring, (place.readers, place.g.key_dim)
    by_reader, by_column = place.layout.reduce(1), place.layout.reduce(0)
    if g.tokens == 1:
        x = along(load(s["queries"].at[0], by_column).astype(f32) * s["numbers"][2, 0], shape, 1)
    else:
        scale = load(s["numbers"].at[2, pl.ds(0, place.readers)], by_reader)
        x = load(s["queries"], place.layout).astype(f32) * along(scale, shape, 0)

    for i in reversed(range(g.tokens)):
        key = load(s["token_keys"].at[i], by_column).astype(f32)
        before, weight = _back(place, x, key, *_token_numbers(place, head, i), s["numbers"][3, i])
        if g.tokens > 1:
            # a token past the length is seen by no query
            seen = iota((place.readers,), 0, by_reader) >= jnp.where(i < place.length, i, place.readers)
            before = jnp.where(along(seen, shape, 0), before, x)
            weight = jnp.where(seen, weight, 0.0)
        store(s["trace"].at[g.window + i, pl.ds(0, place.readers)], weight)
        x = before

    def one(j: Array, x: Array) -> Array:
        row = ring.row(ring.count - 1 - j)
        key = load(s["keys"].at[row], by_column).astype(f32)
        if g.channel_gate:
            alpha = jnp.exp(load(s["decays"].at[row], by_column))
            beta: Any = s["weights"][0, row]
        elif g.tokens == 1:
            alpha, beta = jnp.exp(_by_head(place, s["decays"], row)), _by_head(place, s["weights"], row)
        else:
            alpha, beta = jnp.exp(s["decays"][head, row]), s["weights"][head, row]
        x, weight = _back(place, x, key, alpha, beta, s["factors"][row] if g.delta_rule else None)
        store(s["trace"].at[row, pl.ds(0, place.readers)], weight)
        return x

    if keeps_direction(g):
        _decay_back(place, x)
    else:
        _store_planes(place, lax.fori_loop(0, ring.count, one, x))
    if "weighing" in s:
        _store_weighing(place)
    plgpu.commit_smem()  # the tensor cores read the planes


def _decay_back(place: Place, x: Array) -> None:
    """``take_back`` of x through the records where only a head gate changes it: its direction stays."""
    s, ring, layout = place.s, place.ring, records_layout(place.g.key_dim)

    @pl.when(ring.count > 0)
    def _():
        query = load(s["queries"].at[0], layout.reduce(0)).astype(f32) * s["numbers"][2, 0]
        keys = load(s["keys"], layout).astype(f32)
        store(s["dots"], jnp.sum(keys * along(query, keys.shape, 1), axis=1))
        barrier()

    def one(j: Array, remains: Array) -> Array:
        row = ring.row(ring.count - 1 - j)
        weight = _by_head(place, s["weights"], row) * (gate * remains) * s["dots"][row]
        store(s["trace"].at[row, pl.ds(0, place.readers)], weight)
        return remains * jnp.exp(_by_head(place, s["decays"], row))

    gate, _ = _token_numbers(place, jnp.int32(0), 0)
    _store_planes(place, x, lax.fori_loop(0, ring.count, one, jnp.ones_like(gate)))


def _by_head(place: Place, ref: Ref, row: Array) -> Array:
    """A column of [heads, L], by reader."""
    return decode.load_column(ref.at[:, pl.ds(row, 1)], place.readers, place.layout.reduce(1), place.interpret)


def _token_numbers(place: Place, head: Array, i: int) -> tuple[Any, Any]:
    """Gate and weight of a token, by reader (T = 1) or for all of them."""
    g, numbers = place.g, place.s["numbers"]
    if g.channel_gate:
        gate = load(place.tokens.log_decay.at[place.b, i, place.first_head], place.layout.reduce(0))
        return jnp.exp(gate), numbers[1, i]
    if g.tokens == 1:
        gate, beta = (load(numbers.at[i, pl.ds(0, place.readers)], place.layout.reduce(1)) for i in range(2))
        return jnp.exp(gate), beta
    return jnp.exp(numbers[0, head * g.tokens + i]), numbers[1, head * g.tokens + i]


def _back(place: Place, x: Array, key: Array, alpha: Any, beta: Any, factor: Any) -> tuple[Array, Array]:
    """x and w of one token; alpha a scalar, by reader, or by channel; the key's factor None if beta has it."""
    weight = jnp.sum(x * along(key, x.shape, 1), axis=1) * (beta if factor is None else beta * factor)
    if place.g.delta_rule:
        x = x - along(weight * factor, x.shape, 0) * along(key, x.shape, 1)
    if alpha.ndim == 0:
        return x * alpha, weight
    return x * along(alpha, x.shape, 1 if place.g.channel_gate else 0), weight


def _store_planes(place: Place, x: Array, remains: Array | None = None) -> None:
    """x times ``remains`` [R] as the sum of planes of 16 bits, in the order of the tile's columns, and its factor.

    The factor takes what remains of x, and of float16 planes a power of two, so that they hold x.
    """
    g, s, (count, dtype) = place.g, place.s, planes_of(place.g)
    readers = pl.ds(0, place.readers)
    if dtype == f16:
        field = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1), i32) & 0x7F800000
        field = jnp.minimum(jnp.maximum(field, 2 << 23), 252 << 23)
        inverse = lax.bitcast_convert_type((254 << 23) - field, f32)
        factor = lax.bitcast_convert_type(field, f32) * (1 / decode.UNIT.get(g.readout, 1.0))
        x = x * along(inverse, x.shape, 0)
        high = x.astype(f16)
        terms: Any = (high, (x - high.astype(f32)).astype(f16))
    else:
        factor = plgpu.layout_cast(jnp.ones((place.readers,), f32), place.layout.reduce(1))
        terms = split_exactly(x) if count == 3 else split(x, nearest=True)
    store(s["scales"].at[readers], factor if remains is None else factor * remains)
    n = columns_of(g, place.config)
    for i, term in enumerate(terms):
        decode.store_plane(g.readout, s["planes"].at[pl.ds(i * n, n)], term, place.interpret)


def _store_weighing(place: Place) -> None:
    """The records' weights as the sum of two bfloat16 planes, dead ones 0."""
    s, g, shape = place.s, place.g, place.s["trace"].shape
    barrier()
    by_source = iota((SOURCES,), 0, VALUES)
    recorded = (by_source < g.window) & (((by_source - place.ring.start) & (g.window - 1)) < place.ring.count)
    weights = jnp.where(along(recorded, shape, 0), load(s["trace"], STATE), 0.0)
    for i, term in enumerate(split(weights, nearest=True)):
        store(s["weighing"].at[pl.ds(i * shape[1], shape[1])].T, term)
