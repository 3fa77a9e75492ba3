"""Answers T tokens per row from what ordinary reads use, a read-out copy or the checkpoint C itself, and raw records.

An answer is linear in C and in the values, so a query is taken back through the tokens, and not the state forward through them.
With records and tokens 1..t, their keys k_j, values v_j, gates alpha_j and betas beta_j,

    x_t = q_t        w_j = beta_j (k_j . x_j)        x_{j-1} = alpha_j (x_j - w_j k_j)        o_t = C x_0 + sum_j w_j v_j

and without the delta rule x_{j-1} = alpha_j x_j. So no update is ever made of a rounded read, a tile is read by one vector per
token, and what is done per record is done in K numbers and not in V K. All of it in float32 but for the product with C, on the
tensor cores: C is cut into bfloat16 or float16 terms that hold a copy exactly (float32 to 2**-16), x_0 to 2**-16 or 2**-22.

A warpgroup takes the queries of one key head back, of a few value heads at once (T = 1) or of all tokens of one value head.
Rows that were due have been folded by ``refresh``, in a kernel before this one.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import decode, records
from pallas_kernels.hopper.readers import DRAFTS, SOURCES
from pallas_kernels.hopper.records import Ring
from pallas_kernels.hopper.tiles import (
    COLUMNS,
    STATE,
    SWIZZLED,
    TILE_ROWS,
    VALUES,
    Array,
    Geometry,
    Interpret,
    Pool,
    Ref,
    Rows,
    Tokens,
    along,
    barrier,
    bf16,
    channels_layout,
    column,
    compiler_params,
    f32,
    i32,
    iota,
    load,
    named,
    one_of,
    records_layout,
    split,
    split_exactly,
    store,
    swizzled,
)
from pallas_kernels.hopper.verify import Product, sum_products

f16 = jnp.float16
_MULTIPROCESSORS = 132
COPY_SCALES = 32  # where in the last row of "numbers" the scales of nvfp4 begin
_CHUNK = 8  # ring rows that are copied together


@dataclasses.dataclass(frozen=True)
class ReadConfig:
    """How the work is cut: value heads that one warpgroup serves, and how many of them are on their way at once."""

    heads: int
    stages: int


def best_read_config(g: Geometry) -> ReadConfig:
    """As many heads of one key head as share its queries, but enough warpgroups to fill the GPU.

    One head at a time: warpgroups that live side by side hide each other's waiting better than what is requested ahead.
    """
    enough, most = max(1, g.rows * g.value_heads // (4 * _MULTIPROCESSORS)), 8 if g.tokens == 1 else 4
    if g.channel_gate:
        return ReadConfig(1, 1)
    return ReadConfig(max(n for n in (1, 2, 4, 8) if g.group_size % n == 0 and n <= min(enough, most)), 1)


def source_dtype(g: Geometry) -> Any:
    """Of what is read: the checkpoint's, or the copy's codes'."""
    return {"checkpoint": jnp.dtype(g.checkpoint_dtype), "bf16": jnp.dtype(jnp.uint16)}.get(g.readout, jnp.dtype(jnp.uint8))


def read(
    rows: Rows,
    tokens: Tokens,
    pool: Pool,
    geometry: Geometry,
    config: ReadConfig | None = None,
    interpret: Interpret = None,
) -> Array:
    """Outputs of T tokens per row, which are recorded behind the committed records. The pointer is left to the caller.

    Args:
        rows: slots, lengths (0 to T) and pointers; due rows have been folded, but their pointers not moved.
        tokens: T tokens, 1 to 16; values in the ring's dtype.
        pool: references to the state, records raw. Block scales of nvfp4 as [N, H, n, c], see ``block_scale_rows``.
        geometry: sizes of the call.
        config: how to cut it, None for the best known.
        interpret: parameters of interpret mode, None on a GPU.

    Returns:
        [B, T, H, V] geometry.value_dtype, zero past each row's length.
    """
    g, config = geometry, config or best_read_config(geometry)
    operands, structure = jax.tree.flatten((rows, tokens, pool))

    def replay_read(*refs: Ref, **scratch: Ref) -> None:
        *inputs, out = refs
        rows, tokens, pool = jax.tree.unflatten(structure, inputs)
        _row(rows, tokens, pool, out, g, config, interpret, named(scratch))

    kernel = plgpu.kernel(
        replay_read,
        out_type=jax.ShapeDtypeStruct((g.rows, g.tokens, g.value_heads, g.value_dim), g.value_dtype),
        grid=(g.rows * g.value_heads // config.heads,),
        grid_names=("heads",),
        scratch_types=_scratch(g, config),
        compiler_params=compiler_params(scalar_reductions=True),
        interpret=interpret,
    )
    return kernel(*operands)


def block_scale_rows(g: Geometry) -> tuple[int, int]:
    """Shape in which a copy wants the block scales of a value head: rows of at most 256 bytes."""
    size = g.value_dim * g.key_dim // 16
    return (size // 256, 256) if size % 256 == 0 else (1, size)


def _readers(g: Geometry, config: ReadConfig) -> int:
    """R, queries that are taken back together: rows of x, a multiple of four."""
    return 4 * (-(-(config.heads if g.tokens == 1 else g.tokens) // 4))


def _columns(g: Geometry, config: ReadConfig) -> int:
    """N, the same as columns of the tensor cores."""
    return -(-_readers(g, config) // 8) * 8


def _planes(g: Geometry) -> tuple[int, Any]:
    """Terms of x, and their dtype, which is the tile's."""
    if g.readout in decode.UNIT or g.readout == "fp8_e4m3":
        return 2, f16
    if g.readout == "checkpoint" and g.checkpoint_dtype == f16:
        return 2, f16
    return (2, bf16) if g.readout == "checkpoint" and g.checkpoint_dtype == f32 else (3, bf16)


def _arrivals(g: Geometry) -> tuple[int, int]:
    """Copies of what comes at the start, and of what comes with a value head."""
    chunks = g.window // _CHUNK
    start = 2 + chunks + (chunks if g.channel_gate else 0) + (not g.channel_gate) + 1 + g.delta_rule
    return start, 1 + (g.readout in ("fp8_e4m3", "nvfp4")) + chunks + 1


def _scratch(g: Geometry, config: ReadConfig) -> dict[str, Any]:
    s, n, r = config.stages, _columns(g, config), _readers(g, config)
    count, dtype = _planes(g)
    decays = (g.window, g.key_dim) if g.channel_gate else (config.heads, g.window)
    start, with_head = _arrivals(g)
    scratch = {
        "queries": plgpu.SMEM((r if g.tokens > 1 else 1, g.key_dim), g.record_dtype),
        "token_keys": plgpu.SMEM((g.tokens, g.key_dim), g.record_dtype),
        "keys": plgpu.SMEM((g.window, g.key_dim), g.record_dtype),
        "decays": plgpu.SMEM(decays, f32),
        "weights": plgpu.SMEM((config.heads, g.window), f32),
        "numbers": plgpu.SMEM((4, 64), f32),
        "trace": plgpu.SMEM((SOURCES, n), f32),
        "scales": plgpu.SMEM((n,), f32),
        "dots": plgpu.SMEM((g.window,), f32),
        "planes": plgpu.SMEM((count * n, g.key_dim), dtype, transforms=swizzled(dtype)),
        "updates": plgpu.SMEM((s, g.window, g.value_dim), g.record_dtype),
        "values": plgpu.SMEM((s, g.tokens, g.value_dim), g.record_dtype),
        "start_arrived": plgpu.Barrier(num_arrivals=start),
        "head_arrived": plgpu.Barrier(num_arrivals=with_head, num_barriers=s),
        **_tile_scratch(g, s),
    }
    if g.record_dtype == bf16:
        scratch["weighing"] = plgpu.SMEM((2 * n, SOURCES), bf16, transforms=swizzled(bf16, DRAFTS))
    if g.delta_rule:
        scratch["factors"] = plgpu.SMEM((g.window,), f32)
    if g.channel_gate:
        scratch["gates"] = plgpu.SMEM((g.tokens, g.key_dim), f32)
    if g.tokens > 1:
        scratch["answers"] = plgpu.SMEM((n, TILE_ROWS), g.value_dtype)
    return scratch


def _tile_scratch(g: Geometry, stages: int) -> dict[str, Any]:
    """Shared memory of what is read: as it is copied, under "tile", and as it is loaded."""
    shape, u8 = (stages, g.value_dim, g.key_dim), jnp.uint8
    match g.readout:
        case "checkpoint":
            return {"tile": plgpu.SMEM(shape, jnp.dtype(g.checkpoint_dtype), transforms=swizzled(g.checkpoint_dtype))}
        case "bf16":
            tiles = (plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)) for dtype in (jnp.uint16, bf16))
            return one_of(dict(zip(("tile", "numbers_of_tile"), tiles, strict=True)))
        case "fp8_e4m3":
            return _codes(stages, g.value_dim, g.key_dim) | {"row_scales": plgpu.SMEM((stages, g.value_dim), f32)}
    copied = plgpu.SMEM((stages, *block_scale_rows(g)), u8)
    scales = plgpu.SMEM((stages, g.value_dim, g.key_dim // 16), u8)
    return _codes(stages, g.value_dim, g.key_dim // 2) | one_of({"copied_scales": copied, "block_scales": scales})


def _codes(stages: int, rows: int, row_bytes: int) -> dict[str, Any]:
    """The same bytes twice, said to be swizzled alike: layout inference might swizzle what is loaded and not what is copied."""
    width = min(row_bytes, 128)
    tile = plgpu.SMEM((stages, rows, row_bytes), jnp.uint8, transforms=swizzled(jnp.uint8, width))
    words = plgpu.SMEM((stages, rows, row_bytes // 4), i32, transforms=swizzled(i32, width // 4))
    return one_of({"tile": tile, "words": words})


def _row(
    rows: Rows, tokens: Tokens, pool: Pool, out: Ref, g: Geometry, config: ReadConfig, interpret: Interpret, s: dict[str, Ref]
) -> None:
    """One warpgroup: finds its row and heads, and answers if the row is live."""
    index, groups = lax.axis_index("heads"), g.value_heads // config.heads
    first_head, b = (index % groups) * config.heads, index // groups
    slot, length = rows.slots[b], rows.lengths[b]
    live = (slot >= 0) & (slot < g.slots) & (length > 0)

    @pl.when(live)
    def _():
        _Reader(rows, tokens, pool, out, g, config, interpret, s, b, first_head, slot, length).run()

    @pl.when(~live)
    def _():
        zeros = plgpu.layout_cast(jnp.zeros((TILE_ROWS,), g.value_dtype), VALUES)

        def one(t: Array, carry: None) -> None:
            h, first = first_head + t // g.tiles, (t % g.tiles) * TILE_ROWS
            for i in range(g.tokens):
                store(out.at[b, i, h, pl.ds(first, TILE_ROWS)], zeros)

        lax.fori_loop(0, config.heads * g.tiles, one, None)


@dataclasses.dataclass
class _Reader:
    """One warpgroup's place in a live row, and its shared memory."""

    rows: Rows
    tokens: Any  # references
    pool: Any
    out: Ref
    g: Geometry
    config: ReadConfig
    interpret: Interpret
    s: dict[str, Ref]
    b: Array
    first_head: Array
    slot: Array
    length: Array

    def __post_init__(self) -> None:
        g, s = self.g, self.s
        self.key_head = self.first_head // g.group_size
        recorded, start = self.rows.length[self.slot], self.rows.origin[self.slot] & (g.window - 1)
        due = recorded + 2 * g.max_draft > g.window
        self.recorded = recorded
        self.ring = Ring(
            s["keys"], [], s["updates"], s["decays"], None, s["weights"], start, jnp.where(due, 0, recorded), g.window
        )
        self.readers, self.layout = _readers(g, self.config), decode.columns_layout(g.key_dim)

    def run(self) -> None:
        g, config = self.g, self.config
        self.request_start()
        for head in range(config.stages):
            self.request_head(jnp.int32(head))
        self.store_numbers()
        plgpu.barrier_wait(self.s["start_arrived"])
        barrier()
        self.append()
        if g.tokens == 1:
            self.take_back(jnp.int32(0))

        def one(head: Array, carry: None) -> None:
            if g.tokens > 1:
                self.take_back(head)
            stage = head % config.stages
            plgpu.barrier_wait(self.s["head_arrived"].at[stage])
            for part in range(g.tiles):
                self.answer(head, stage, part)

            @pl.when(head + config.stages < config.heads)
            def _():
                barrier()  # everybody has read what the copies overwrite
                self.request_head(head + config.stages)

        lax.fori_loop(0, config.heads, one, None)
        if g.tokens > 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Copies.

    def request_start(self) -> None:
        g, s, pool, arrived = self.g, self.s, self.pool, self.s["start_arrived"]
        heads = pl.ds(self.first_head, self.config.heads)
        plgpu.copy_gmem_to_smem(self.tokens.q.at[self.b, :, self.key_head], s["queries"].at[pl.ds(0, g.tokens)], arrived)
        plgpu.copy_gmem_to_smem(self.tokens.k.at[self.b, :, self.key_head], s["token_keys"], arrived)
        records.request_keys(pool, self.slot, self.key_head, self.ring, _CHUNK, arrived, self.interpret)
        if g.channel_gate:
            for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, _CHUNK)):
                rows = pl.ds(i * _CHUNK, _CHUNK)
                source = pool.log_decay.at[self.slot, self.first_head, rows]
                records.copy_if(wanted, source, s["decays"].at[rows], arrived, self.interpret)
        else:
            plgpu.copy_gmem_to_smem(pool.log_decay.at[self.slot, heads], s["decays"], arrived)
        plgpu.copy_gmem_to_smem(pool.weight.at[self.slot, heads], s["weights"], arrived)
        if g.delta_rule:
            plgpu.copy_gmem_to_smem(pool.factor.at[self.slot, self.key_head], s["factors"], arrived)

    def request_head(self, head: Array) -> None:
        """Requests what is read of a value head, its scales, the records' values and the tokens' ones."""
        g, s, pool, slot, interpret = self.g, self.s, self.pool, self.slot, self.interpret
        h, stage = self.first_head + head, head % self.config.stages
        arrived = s["head_arrived"].at[stage]
        source = pool.checkpoint if g.readout == "checkpoint" else pool.payload
        plgpu.copy_gmem_to_smem(source.at[slot, h], s["tile"].at[stage], arrived)
        if g.readout == "fp8_e4m3":
            plgpu.copy_gmem_to_smem(pool.scale.at[slot, h], s["row_scales"].at[stage], arrived)
        if g.readout == "nvfp4":
            plgpu.copy_gmem_to_smem(pool.block_scale.at[slot, h], s["copied_scales"].at[stage], arrived)
        for i, wanted in enumerate(records.chunks_needed(self.ring.start, self.ring.count, g.window, _CHUNK)):
            rows = pl.ds(i * _CHUNK, _CHUNK)
            records.copy_if(wanted, pool.update.at[slot, h, rows], s["updates"].at[stage, rows], arrived, interpret)
        plgpu.copy_gmem_to_smem(self.tokens.v.at[self.b, :, h], s["values"].at[stage], arrived)

    # The tokens' numbers: rows of "numbers" hold log decays and betas by head and token, scales of queries and keys by token;
    # behind the latter those of the heads' copies.

    def store_numbers(self) -> None:
        g, numbers, b = self.g, self.s["numbers"], self.b
        if g.readout == "nvfp4":
            for h in range(self.config.heads):
                numbers[3, COPY_SCALES + h] = self.pool.scale[self.slot, self.first_head + h]
        for i in range(g.tokens):
            for h in range(self.config.heads):
                if not g.channel_gate:
                    numbers[0, h * g.tokens + i] = self.tokens.log_decay[b, i, self.first_head + h]
                numbers[1, h * g.tokens + i] = self.tokens.beta[b, i, self.first_head + h]
            numbers[2, i] = self.tokens.q_scale[b, i, self.key_head]
            numbers[3, i] = self.tokens.k_scale[b, i, self.key_head]

    def append(self) -> None:
        """Records the tokens, but for their values."""
        g, s, pool, numbers = self.g, self.s, self.pool, self.s["numbers"]
        layout = channels_layout(g.key_dim)

        def row(i: Array) -> Array:
            return self.ring.row(self.recorded + i)

        def one(i: Array, carry: None) -> None:
            for h in range(self.config.heads):
                head = self.first_head + h
                if not g.channel_gate:
                    pool.log_decay[self.slot, head, row(i)] = numbers[0, h * g.tokens + i]
                scale = 1.0 if g.delta_rule else numbers[3, i]
                pool.weight[self.slot, head, row(i)] = numbers[1, h * g.tokens + i] * scale
            if g.channel_gate:
                gate = self.tokens.log_decay.at[self.b, i, self.first_head]
                store(pool.log_decay.at[self.slot, self.first_head, row(i)], load(gate, layout))

        lax.fori_loop(0, self.length, one, None)

        @pl.when(self.first_head % g.group_size == 0)
        def _():
            def one(i: Array, carry: None) -> None:
                store(pool.key.at[self.slot, self.key_head, row(i)], load(s["token_keys"].at[i], layout))
                if g.delta_rule:
                    pool.factor[self.slot, self.key_head, row(i)] = numbers[3, i]

            lax.fori_loop(0, self.length, one, None)

    # Queries taken back.

    def take_back(self, head: Array) -> None:
        """Fills "trace" with the weights w_j by ring row, behind those the tokens', and the planes with x_0.

        Args:
            head: the first value head of them, counted from the warpgroup's first.
        """
        g, s, ring, shape = self.g, self.s, self.ring, (self.readers, self.g.key_dim)
        by_reader, by_column = self.layout.reduce(1), self.layout.reduce(0)
        if g.tokens == 1:
            x = along(load(s["queries"].at[0], by_column).astype(f32) * s["numbers"][2, 0], shape, 1)
        else:
            scale = load(s["numbers"].at[2, pl.ds(0, self.readers)], by_reader)
            x = load(s["queries"], self.layout).astype(f32) * along(scale, shape, 0)

        for i in reversed(range(g.tokens)):
            key = load(s["token_keys"].at[i], by_column).astype(f32)
            before, weight = self.back(x, key, *self.token_numbers(head, i), s["numbers"][3, i])
            if g.tokens > 1:
                # a token past the length is seen by no query
                seen = iota((self.readers,), 0, by_reader) >= jnp.where(i < self.length, i, self.readers)
                before = jnp.where(along(seen, shape, 0), before, x)
                weight = jnp.where(seen, weight, 0.0)
            store(s["trace"].at[g.window + i, pl.ds(0, self.readers)], weight)
            x = before

        def one(j: Array, x: Array) -> Array:
            row = ring.row(ring.count - 1 - j)
            key = load(s["keys"].at[row], by_column).astype(f32)
            if g.channel_gate:
                alpha = jnp.exp(load(s["decays"].at[row], by_column))
                beta: Any = s["weights"][0, row]
            elif g.tokens == 1:
                alpha, beta = jnp.exp(self.by_head(s["decays"], row)), self.by_head(s["weights"], row)
            else:
                alpha, beta = jnp.exp(s["decays"][head, row]), s["weights"][head, row]
            x, weight = self.back(x, key, alpha, beta, s["factors"][row] if g.delta_rule else None)
            store(s["trace"].at[row, pl.ds(0, self.readers)], weight)
            return x

        if g.tokens == 1 and not (g.delta_rule or g.channel_gate):
            self.decay_back(x)
        else:
            self.store_planes(lax.fori_loop(0, ring.count, one, x))
        if "weighing" in s:
            self.store_weighing()
        plgpu.commit_smem()  # the tensor cores read the planes

    def decay_back(self, x: Array) -> None:
        """``take_back`` of x through the records where only a head gate changes it: its direction stays."""
        s, ring, layout = self.s, self.ring, records_layout(self.g.key_dim)

        @pl.when(ring.count > 0)
        def _():
            query = load(s["queries"].at[0], layout.reduce(0)).astype(f32) * s["numbers"][2, 0]
            keys = load(s["keys"], layout).astype(f32)
            store(s["dots"], jnp.sum(keys * along(query, keys.shape, 1), axis=1))
            barrier()

        def one(j: Array, remains: Array) -> Array:
            row = ring.row(ring.count - 1 - j)
            weight = self.by_head(s["weights"], row) * (gate * remains) * s["dots"][row]
            store(s["trace"].at[row, pl.ds(0, self.readers)], weight)
            return remains * jnp.exp(self.by_head(s["decays"], row))

        gate, _ = self.token_numbers(jnp.int32(0), 0)
        self.store_planes(x, lax.fori_loop(0, ring.count, one, jnp.ones_like(gate)))

    def by_head(self, ref: Ref, row: Array) -> Array:
        """A column of [heads, L], by reader."""
        return decode.load_column(ref.at[:, pl.ds(row, 1)], self.readers, self.layout.reduce(1), self.interpret)

    def token_numbers(self, head: Array, i: int) -> tuple[Any, Any]:
        """Gate and weight of a token, by reader (T = 1) or for all of them."""
        g, numbers = self.g, self.s["numbers"]
        if g.channel_gate:
            gate = load(self.tokens.log_decay.at[self.b, i, self.first_head], self.layout.reduce(0))
            return jnp.exp(gate), numbers[1, i]
        if g.tokens == 1:
            gate, beta = (load(numbers.at[i, pl.ds(0, self.readers)], self.layout.reduce(1)) for i in range(2))
            return jnp.exp(gate), beta
        return jnp.exp(numbers[0, head * g.tokens + i]), numbers[1, head * g.tokens + i]

    def back(self, x: Array, key: Array, alpha: Any, beta: Any, factor: Any) -> tuple[Array, Array]:
        """x and w of one token; alpha a scalar, by reader, or by channel; the key's factor None if beta has it."""
        weight = jnp.sum(x * along(key, x.shape, 1), axis=1) * (beta if factor is None else beta * factor)
        if self.g.delta_rule:
            x = x - along(weight * factor, x.shape, 0) * along(key, x.shape, 1)
        if alpha.ndim == 0:
            return x * alpha, weight
        return x * along(alpha, x.shape, 1 if self.g.channel_gate else 0), weight

    def store_planes(self, x: Array, remains: Array | None = None) -> None:
        """x times ``remains`` [R] as the sum of planes of 16 bits, in the order of the tile's columns, and its factor.

        The factor takes what remains of x, and of float16 planes a power of two, so that they hold x.
        """
        g, s, (count, dtype) = self.g, self.s, _planes(self.g)
        readers = pl.ds(0, self.readers)
        if dtype == f16:
            field = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=1), i32) & 0x7F800000
            field = jnp.minimum(jnp.maximum(field, 2 << 23), 252 << 23)
            inverse = lax.bitcast_convert_type((254 << 23) - field, f32)
            factor = lax.bitcast_convert_type(field, f32) * (1 / decode.UNIT.get(g.readout, 1.0))
            x = x * along(inverse, x.shape, 0)
            high = x.astype(f16)
            terms: Any = (high, (x - high.astype(f32)).astype(f16))
        else:
            factor = plgpu.layout_cast(jnp.ones((self.readers,), f32), self.layout.reduce(1))
            terms = split_exactly(x) if count == 3 else split(x, nearest=True)
        store(s["scales"].at[readers], factor if remains is None else factor * remains)
        n = _columns(g, self.config)
        for i, term in enumerate(terms):
            decode.store_plane(g.readout, s["planes"].at[pl.ds(i * n, n)], term, self.interpret)

    def store_weighing(self) -> None:
        """The records' weights as the sum of two bfloat16 planes, dead ones 0."""
        s, g, shape = self.s, self.g, self.s["trace"].shape
        barrier()
        by_source = iota((SOURCES,), 0, VALUES)
        recorded = (by_source < g.window) & (((by_source - self.ring.start) & (g.window - 1)) < self.ring.count)
        weights = jnp.where(along(recorded, shape, 0), load(s["trace"], STATE), 0.0)
        for i, term in enumerate(split(weights, nearest=True)):
            store(s["weighing"].at[pl.ds(i * shape[1], shape[1])].T, term)

    # Answers.

    def answer(self, head: Array, stage: Array, part: int) -> None:
        """64 values: reads their rows of the state, stores answers and values."""
        g, s = self.g, self.s
        values = pl.ds(part * TILE_ROWS, TILE_ROWS)
        answers = self.multiply(self.products(stage, values), s["planes"])
        answers = answers * along(load(s["scales"], COLUMNS), answers.shape, 1)
        if g.readout == "nvfp4":
            answers = answers * s["numbers"][3, COPY_SCALES + head]
        if g.readout == "fp8_e4m3":
            answers = answers * along(load(s["row_scales"].at[stage, values], VALUES), answers.shape, 0)
        answers = answers + self.weigh_records(stage, values, answers.shape)
        h = self.first_head + head
        if g.tokens == 1:
            self.answer_one(head, h, stage, values, answers)
        else:
            self.answer_many(h, stage, values, answers)

    def multiply(self, products: Iterable[list[Product]], planes: Ref) -> Array:
        """The sum of products with planes [i N, columns], and of these. [64, N]"""
        both = sum_products(products, planes.shape[0], self.interpret)
        n = _columns(self.g, self.config)
        parts = [both[:, i : i + n] for i in range(0, planes.shape[0], n)]
        return sum(parts[1:], parts[0])

    def weigh_records(self, stage: Array, values: Any, shape: tuple[int, ...]) -> Array:
        """What the records add to the answers: their values by the weights in "trace"."""
        s, ring = self.s, dataclasses.replace(self.ring, update=self.s["updates"].at[stage, :, values])
        if "weighing" in s:
            (terms,) = records.sources(ring, None)
            weights, columns = s["weighing"], range(0, self.g.window, DRAFTS)
            return self.multiply(([(terms[:, i : i + DRAFTS], weights, pl.ds(i, DRAFTS))] for i in columns), weights)

        def one(j: Array, answers: Array) -> Array:
            row = ring.row(j)
            value = load(s["updates"].at[stage, row, values], VALUES).astype(f32)
            return answers + along(value, shape, 0) * along(load(s["trace"].at[row], COLUMNS), shape, 1)

        return lax.fori_loop(0, ring.count, one, plgpu.layout_cast(jnp.zeros(shape, f32), STATE))

    def answer_one(self, head: Array, h: Array, stage: Array, values: Any, answers: Array) -> None:
        g, s = self.g, self.s
        answer = jnp.sum(jnp.where(iota(answers.shape, 1, STATE) == head, answers, 0.0), axis=1)
        value = load(s["values"].at[stage, 0, values], VALUES)
        answer = answer + value.astype(f32) * s["trace"][g.window, head]
        store(self.out.at[self.b, 0, h, values], answer.astype(g.value_dtype))
        store(self.pool.update.at[self.slot, h, self.ring.row(self.recorded), values], value)

    def answer_many(self, h: Array, stage: Array, values: Any, answers: Array) -> None:
        g, s, shape = self.g, self.s, answers.shape
        for i in range(g.tokens):
            value = load(s["values"].at[stage, i, values], VALUES)
            live = iota((TILE_ROWS,), 0, VALUES) < jnp.where(i < self.length, TILE_ROWS, 0)
            weights = along(load(s["trace"].at[g.window + i], COLUMNS), shape, 1)
            answers = answers + along(jnp.where(live, value.astype(f32), 0.0), shape, 0) * weights

            @pl.when(i < self.length)
            def _(i: int = i, value: Array = value) -> None:
                store(self.pool.update.at[self.slot, h, self.ring.row(self.recorded + i), values], value)

        outputs = jnp.where(iota(shape, 1, STATE) < self.length, answers, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        barrier()
        if jnp.dtype(g.value_dtype).itemsize == 2:
            store(s["answers"].T, outputs.astype(g.value_dtype))
        else:  # what transposes on its way to shared memory takes 16 bits
            for i in range(g.tokens):
                store(s["answers"].at[i], column(outputs, i))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["answers"].at[pl.ds(0, g.tokens)], self.out.at[self.b, :, h, values])

    def products(self, stage: Array, values: Any) -> Iterator[list[Product]]:
        """Products of a tile with the planes, 32 columns at a time."""
        g, s, planes = self.g, self.s, self.s["planes"]
        whole = None
        if g.readout == "fp8_e4m3":
            whole = decode.decode_fp8(self.codes(stage, values), self.interpret)
        if g.readout == "nvfp4":
            if self.interpret is None:
                scales = load(s["block_scales"].at[stage, values], decode.block_scales_layout(g.key_dim))
            else:
                scales = s["copied_scales"][stage].reshape(g.value_dim, -1)[values.start : values.start + TILE_ROWS]
            whole = decode.decode_nvfp4(self.codes(stage, values), scales, self.interpret)
        for first in range(0, g.key_dim, SWIZZLED):
            columns = pl.ds(first, SWIZZLED)
            if whole is not None:
                yield [(whole[:, first : first + SWIZZLED], planes, columns)]
                continue
            if g.readout == "bf16" and self.interpret is not None:
                state = lax.bitcast_convert_type(s["tile"].at[stage, values, columns][...], bf16)
            else:
                state = load(s["numbers_of_tile" if g.readout == "bf16" else "tile"].at[stage, values, columns], STATE)
            if state.dtype != f32:
                yield [(state, planes, columns)]
                continue
            high, low = split(state)
            yield [(high, planes, columns), (low, planes, columns)]

    def codes(self, stage: Array, values: Any) -> Array:
        if self.interpret is not None:
            return self.s["tile"].at[stage, values][...]
        return load(self.s["words"].at[stage, values], decode.words_layout(self.g.readout, self.g.key_dim))
