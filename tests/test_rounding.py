"""Stochastic rounding of a checkpoint: unbiased, keyed by who is rounded and not by where, and defined at both ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from pallas_kernels.small_floats import BFLOAT16, FLOAT16, round_to
from replayssm_jax.rounding import checkpoint_noise
from tests.cases import case_named, make_tokens
from tests.compare import same_bits
from tests.lockstep import FAST_COMPILE, jitted

TARGETS = {"float16": FLOAT16, "bfloat16": BFLOAT16}
every_dtype = pytest.mark.parametrize("dtype", TARGETS)


def rounded(x, dtype: str, noise=None) -> np.ndarray:
    """``round_to`` as numbers of the dtype."""
    patterns = jax.jit(round_to, static_argnums=1, compiler_options=FAST_COMPILE)(jnp.asarray(x), TARGETS[dtype], noise)
    return np.asarray(jax.lax.bitcast_convert_type(patterns, jnp.dtype(dtype)))


def floats_of_every_size(rng, dtype: str) -> np.ndarray:
    """4,096 float32s from below the smallest subnormal of the dtype to its largest number, of both signs."""
    low, high = np.log2(float(jnp.finfo(dtype).smallest_subnormal)) - 3, np.log2(float(jnp.finfo(dtype).max)) - 0.01
    # below 2^-126 a float32 is subnormal itself, which some processors take for zero
    return (np.exp2(rng.uniform(max(low, -126), high, 4096)) * rng.choice([-1, 1], 4096)).astype(np.float32)


@every_dtype
def test_rounding_to_nearest_in_integers_is_that_of_numpy(dtype, rng):
    x = np.concatenate([floats_of_every_size(rng, dtype), [0.0, -0.0, np.nan]]).astype(np.float32)
    ties = rounded(x, dtype).astype(np.float32) * np.float32(1 + float(jnp.finfo(dtype).eps) / 2)
    for values in (x, ties):
        want = values.astype(jnp.dtype(dtype))
        want = np.where(
            np.isinf(want.astype(np.float32)) & np.isfinite(values), np.copysign(jnp.finfo(dtype).max, values), want
        )
        np.testing.assert_array_equal(rounded(values, dtype).astype(np.float32), want.astype(np.float32))


@every_dtype
def test_means_of_many_draws_are_what_was_rounded(dtype, rng):
    """Subnormals included: every draw is a neighbour of x, and the mean of 4,096 of them is within chance of x."""
    x, draws = floats_of_every_size(rng, dtype)[:512], 4096
    noise = checkpoint_noise(0, jnp.arange(draws), jnp.full(draws, 16), jnp.arange(1), x.size).reshape(draws, -1)
    got = rounded(np.broadcast_to(x, noise.shape), dtype, noise).astype(np.float64)
    down = rounded(x, dtype, jnp.zeros(x.shape, jnp.uint32)).astype(np.float64)
    up = rounded(x, dtype, jnp.full(x.shape, 2**32 - 1, jnp.uint32)).astype(np.float64)
    assert ((np.abs(down) <= np.abs(x)) & (np.abs(x) <= np.abs(up))).all()
    assert ((got == down) | (got == up)).all()
    step = np.abs(up - down)
    spread = np.abs(got.mean(axis=0) - x)[step > 0] / step[step > 0] * np.sqrt(draws)
    assert spread.max() < 6 / 2  # a coin's deviation is at most a half
    assert (got[:, step == 0] == x[step == 0]).all()
    tiny = np.abs(x) < float(jnp.finfo(dtype).tiny)
    assert dtype == "bfloat16" or tiny.sum() > 100


@every_dtype
def test_noise_saturates_and_keeps_zero_and_nan(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = np.float32(
        [largest, -largest, np.inf, -np.inf, 0.0, -0.0, np.nan, np.nextafter(np.float32(largest), np.float32(np.inf))]
    )
    for noise in (0, 2**31, 2**32 - 1):
        got = rounded(x, dtype, jnp.full(x.shape, noise, jnp.uint32)).astype(np.float32)
        np.testing.assert_array_equal(got, np.float32([largest, -largest, largest, -largest, 0.0, -0.0, np.nan, largest]))
        np.testing.assert_array_equal(np.signbit(got[:6]), [False, True, False, True, False, True])


def numpy_mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def test_noise_is_the_hash_that_is_written_down():
    seed, request, position, head, element = 2**32 - 5, -3, 17, 6, 40
    with np.errstate(over="ignore"):
        stream = np.uint32((seed + 0x9E3779B9) % 2**32)
        for part in (0, request, position, head):
            stream = numpy_mix(stream ^ np.int32(part).view(np.uint32))
        want = numpy_mix(stream ^ numpy_mix(np.uint32(element)))
    got = checkpoint_noise(seed, jnp.int32([9, request]), jnp.int32([1, position]), jnp.int32([head]), 64)
    assert got[1, 0, element] == want


def run_rows(case, tokens, slots, requests, num_slots=4) -> rs.ReplayState:
    """Rows of drafts in slots of a fresh pool under their request ids; all are accepted and folded."""
    state = jitted("reset")(rs.init_state(case.recurrence, case.policy, num_slots), np.array(slots), np.array(requests))
    for first in range(0, tokens.q.shape[1], case.max_draft):
        drafts = jax.tree.map(lambda x: x[:, first : first + case.max_draft], tokens)  # noqa: B023
        state, _ = jitted("verify")(state, drafts, np.array(slots))
        accepted = np.full(len(slots), case.max_draft)
        state = dataclasses.replace(state, pointer=jitted("commit")(state.pointer, accepted, np.array(slots)))
    return jitted("flush")(state)


def test_a_request_rounds_alike_in_any_slot_beside_anything(rng):
    case = case_named("gdn", checkpoint="float16", rounding="stochastic")
    tokens = make_tokens(case, rng, 3, 24)
    moved = jax.tree.map(lambda x: x[::-1], tokens)
    here, there = run_rows(case, tokens, [0, 1, 2], [5, 6, 7]), run_rows(case, moved, [3, 0, 1], [7, 6, 5])
    for slot, other in [(0, 1), (1, 0), (2, 3)]:
        assert same_bits(here.checkpoint[slot], there.checkpoint[other])
    assert here.pointer.request.tolist() == [5, 6, 7, 0]
    others = run_rows(case, tokens, [0, 1, 2], [8, 9, 10])
    assert np.mean(here.checkpoint[:3] != others.checkpoint[:3]) > 0.2
    fork = jitted("copy_slots")(here, np.array([0]), np.array([3]))
    assert fork.pointer.request[3] == 5


def test_chance_beats_rounding_to_nearest_where_steps_are_small():
    """Gains below half a unit in the last place per flush: nearest never moves, chance gets there on average."""
    ends = {}
    for rounding in ("nearest", "stochastic"):
        case = case_named("gla", heads=(1, 1), dims=(16, 16), window=2, max_draft=1, checkpoint="float16", rounding=rounding)
        one = np.eye(16, dtype=np.float32)[None, :, None]  # sixteen tokens, one per column

        def add(state, value, one=one):
            tokens = rs.Tokens(
                q=one, k=one, v=jnp.full((1, 16, 1, 16), value), log_decay=jnp.zeros((1, 16, 1, 16)), beta=jnp.ones((1, 16, 1))
            )
            return rs.prefill(state, tokens)[0], None

        state, _ = add(rs.init_state(case.recurrence, case.policy, 1), jnp.float32(1.0))
        gain = jnp.full(256, 2.0**-13)  # an eighth of float16's step at 1
        state, _ = jax.jit(lambda state, gain: jax.lax.scan(add, state, gain))(state, gain)
        ends[rounding] = np.asarray(state.checkpoint, np.float64)
    assert (ends["nearest"] == 1.0).all()
    assert abs(ends["stochastic"].mean() - (1 + 256 * 2.0**-13)) < 2e-3
    assert len(np.unique(ends["stochastic"])) > 4
