"""The refresh kernel in interpret mode, which runs on a CPU and finds races: every format, every switch, tiny shapes."""

import dataclasses
import importlib
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import due, encode, heads
from pallas_kernels.hopper.refresh import refresh_unsupported
from pallas_kernels.small_floats import E2M1_HALFWAY
from tests.cases import Case
from tests.compare import same_bits
from tests.kernel_runs import INTERPRET
from tests.lockstep import whole_checkpoint
from tests.refresh_runs import (
    LENGTHS,
    SLOTS,
    assert_chance_is_right,
    assert_refresh_is_right,
    geometry_of,
    make_state,
    run_refresh,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")
COUNTS = [15, 16, 3, 16, 0]


def _case(id, heads, dims, delta_rule, gate, readout, **rest):
    return Case(
        id=id, heads=heads, dims=dims, delta_rule=delta_rule, gate=gate, readout=readout, records="raw", max_draft=2, **rest
    )


CASES = (
    _case("gdn", (2, 1), (16, 32), True, "head", "nvfp4", activations="bfloat16"),
    _case("gdn-two-tiles", (1, 1), (80, 64), True, "head", "nvfp4", checkpoint="bfloat16"),
    _case("kda", (2, 2), (64, 128), True, "channel", "fp8_e4m3", activations="float16", checkpoint="float16"),
    _case("mamba2", (2, 1), (24, 96), False, "head", "bf16", activations="bfloat16"),
    _case("gla", (2, 1), (8, 32), False, "channel", "nvfp4"),
    _case("gdn-plane", (1, 1), (80, 64), True, "head", "bf16_plane", activations="bfloat16"),
    _case("none", (1, 1), (8, 32), True, "channel", "checkpoint", checkpoint="bfloat16"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_refresh(case, rng, no_races):
    state = make_state(case, rng, COUNTS)
    assert_refresh_is_right(state, SLOTS, LENGTHS, case.id in ("gdn", "kda"), 2e-6, INTERPRET)


@pytest.mark.parametrize("gate", ["channel", pytest.param("head", marks=pytest.mark.long)])
def test_a_window_of_32(gate, rng, no_races, monkeypatch):
    """With readers of a channel gate that take the place of keys and decays, as where memory is short."""
    monkeypatch.setattr(heads, "shares_keys", lambda g, answers: gate == "channel")
    case = _case(gate, (2, 1), (16, 32), True, gate, "checkpoint", window=32, activations="bfloat16")
    assert_refresh_is_right(make_state(case, rng, [23, 32, 5, 17, 0]), SLOTS, LENGTHS, False, 2e-6, INTERPRET)


@pytest.mark.parametrize(
    ("case", "readout", "held"),
    [
        (CASES[1], "fp8_e4m3", 1),
        pytest.param(CASES[1], "fp8_e4m3", 2, marks=pytest.mark.long),
        (CASES[1], "nvfp4", 2),
        (CASES[4], "nvfp4", 1),
        (CASES[5], "bf16_plane", 1),
    ],
    ids=lambda x: getattr(x, "id", x),
)
def test_a_block_that_serves_several_heads(case, readout, held, rng, no_races, monkeypatch):
    """One after the other in the same shared memory, which also holds one tile at a time where it need not hold them all."""
    monkeypatch.setattr(importlib.import_module("pallas_kernels.hopper.refresh"), "_MULTIPROCESSORS", 1)
    monkeypatch.setattr(heads, "_held", lambda g, answers, shares: held)
    case = dataclasses.replace(case, heads=(2, 1), readout=readout)
    assert_refresh_is_right(make_state(case, rng, COUNTS), SLOTS, LENGTHS, False, 2e-6, INTERPRET)


@pytest.mark.parametrize("case", [pytest.param(CASES[1], marks=pytest.mark.long), CASES[2]], ids=lambda case: case.id)
def test_rounding_by_chance(case, rng, no_races):
    """A device's share of the heads, whose numbers begin elsewhere, is rounded as in ``rounding``."""
    state = make_state(dataclasses.replace(case, rounding="stochastic", dims=(16, 32)), rng, COUNTS[:2])
    state = dataclasses.replace(state, first_head=jnp.int32(6))
    slots, lengths = np.array([1, 0], np.int32), np.ones(2, np.int32)
    after = assert_refresh_is_right(state, slots, lengths, False, 2e-6, INTERPRET)
    assert_chance_is_right(state, slots, lengths, after, INTERPRET)


def test_the_checkpoint_does_not_depend_on_the_copy(rng, no_races):
    case, pools = CASES[0], []
    seed = int(rng.integers(2**31))
    for form in ("checkpoint", "nvfp4", "bf16_plane"):
        state = make_state(dataclasses.replace(case, readout=form), np.random.default_rng(seed), COUNTS[:1])
        after = run_refresh(state, np.zeros(1, np.int32), np.ones(1, np.int32), True, INTERPRET)
        pools.append(np.asarray(whole_checkpoint(after)))
    assert not same_bits(pools[0], np.asarray(whole_checkpoint(state)))
    for pool in pools[1:]:
        assert same_bits(pools[0], pool)


@pytest.mark.parametrize("readout", ["bf16", "fp8_e4m3", "nvfp4"])
def test_what_is_not_finite_enters_no_scale(readout, rng, no_races):
    state = make_state(dataclasses.replace(CASES[4], readout=readout), rng, [2])
    odd = jnp.array([jnp.inf, jnp.nan, -jnp.inf, -0.0, 1e-40, 3e38, 0.0, 1e-6])
    checkpoint = state.checkpoint.at[0, 0, jnp.arange(8), 3 * jnp.arange(8)].set(odd).at[0, 1, 2].set(0.0)
    state = dataclasses.replace(state, checkpoint=checkpoint)
    assert_refresh_is_right(state, np.zeros(1, np.int32), np.ones(1, np.int32), False, 2e-6, INTERPRET)


def test_more_rows_than_one_look_takes_in(rng, no_races, monkeypatch):
    monkeypatch.setattr(importlib.import_module("pallas_kernels.hopper.refresh"), "_MULTIPROCESSORS", 1)
    slots = np.full(due.ROWS_AT_ONCE + 70, -1, np.int32)
    slots[[3, 40, due.ROWS_AT_ONCE, due.ROWS_AT_ONCE + 69]] = [2, 0, 3, 1]
    state = make_state(dataclasses.replace(CASES[0], readout="checkpoint"), rng, [16, 3, 15, 14])
    assert_refresh_is_right(state, slots, np.ones(len(slots), np.int32), True, 2e-6, INTERPRET)


def test_codes_of_nvfp4_are_rounded_as_an_exact_quotient():
    """The arithmetic of ``encode``, in which interpret mode has no part: around every halfway point of every block scale."""

    def fma(x, y, z):
        return (np.float64(x) * np.float64(y) + z).astype(np.float32)

    one = np.float32(1)
    scales = np.arange(1, 0x7F, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)[:, None]
    steps = np.arange(-32, 33, dtype=np.int32)
    at = np.concatenate(
        [((scales * np.float32(half)).view(np.int32) + steps).view(np.float32) for half in E2M1_HALFWAY], axis=1
    )
    sizes = np.concatenate([at, np.broadcast_to(np.float32([0, 1e-30, 2688]), (len(scales), 3))], axis=1)
    want = sum((sizes > scales * half if n % 2 == 0 else sizes >= scales * half) for n, half in enumerate(E2M1_HALFWAY))
    for off in (-1, 0, 1):  # the hardware's 1 / x may be off in the last bit
        inverse = ((one / scales).view(np.int32) + off).view(np.float32)
        quotient = fma(sizes, inverse, sizes * (fma(-scales, inverse, one) * inverse))
        half = np.float32(encode._ROUND)
        lines = fma(quotient, 2, half), quotient + (half + 2), fma(quotient, 0.5, half + 4)
        assert (np.minimum(np.minimum.reduce(lines), half + 7) - half == want).all()


def test_refusals_say_what_would_work(rng):
    state = make_state(CASES[0], rng, [1])
    g = geometry_of(state, 1)
    assert refresh_unsupported(g) is None
    for change, words in (
        ({"window": 24}, "window=16"),
        ({"key_dim": 48}, "multiples of 32"),
        ({"value_dim": 12}, "multiples of 8"),
        ({"value_dim": 256, "key_dim": 256}, "readout='fp8_e4m3' or a checkpoint of 16 bits would do"),
        ({"value_dim": 512, "key_dim": 256}, "readout='fp8_e4m3' would do"),
    ):
        assert words in refresh_unsupported(dataclasses.replace(g, **change))


def test_no_fold_is_refused_for_the_answers_that_it_would_have_room_for_alone(rng):
    """Rows are then answered in a kernel of their own."""
    whole = geometry_of(make_state(dataclasses.replace(CASES[0], records="raw"), rng, [1]), 1)
    whole = dataclasses.replace(whole, value_heads=4, key_heads=1, readout="checkpoint")
    for window, dim, tokens in itertools.product((16, 32), (64, 256), (1, 8, 16)):
        sizes = {"window": window, "key_dim": dim, "value_dim": dim, "tokens": tokens, "max_draft": tokens}
        g = dataclasses.replace(whole, **sizes)
        if heads.shared_kb(g, answers=False) <= 227:
            assert refresh_unsupported(g) is None
    assert not heads.answers_folded(g), "the largest of them takes no answers"
