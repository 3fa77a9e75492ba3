"""The kernels on a Hopper GPU at real geometries; skipped elsewhere. Run with ``JAX_PLATFORMS=cuda pytest tests/gpu``."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import replay_pallas
from tests.cases import Case, make_tokens
from tests.compare import relative_error, same_bits
from tests.kernel_runs import assert_flush_is_right, assert_verify_is_right, make_call, verify_tolerance, with_drafts

pytestmark = pytest.mark.skipif(replay_pallas.missing_gpu() is not None, reason=str(replay_pallas.missing_gpu()))


def _case(id, heads, dims, delta_rule, gate, **rest):
    return Case(id=id, heads=heads, dims=dims, delta_rule=delta_rule, gate=gate, records="update", **rest)


_B, _H = "bfloat16", "float16"
CASES = (
    _case("gdn-16/64", (64, 16), (128, 128), True, "head", factors=True, activations=_B),
    _case("gdn-f32", (12, 4), (128, 128), True, "head", window=32),
    _case("gdn-olmo", (30, 30), (192, 96), True, "head", beta_max=2.0, activations=_B),
    _case("gdn-bf16-checkpoint", (48, 16), (128, 128), True, "head", checkpoint=_B, activations=_B),
    _case("gdn-f16-256", (8, 8), (256, 256), True, "head", checkpoint=_H, activations=_H, window=32),
    _case("gdn-64", (12, 12), (64, 64), True, "head", activations=_B),
    _case("kda", (32, 32), (128, 128), True, "channel", factors=True, activations=_B),
    _case("kda-f16", (12, 12), (128, 128), True, "channel", activations=_H, window=32, checkpoint=_H),
    _case("kda-64", (12, 4), (64, 64), True, "channel"),
    _case("mamba2", (128, 8), (64, 128), False, "head", activations=_B),
    _case("mamba2-80", (96, 8), (80, 128), False, "head", activations=_B),
    _case("mamba2-256-heads", (256, 8), (64, 128), False, "head", activations=_B),
    _case("mamba2-n256", (48, 1), (64, 256), False, "head", checkpoint=_B, activations=_B, window=32),
    _case("mamba2-n96", (24, 1), (64, 96), False, "head"),
    _case("gla", (12, 12), (64, 64), False, "channel", activations=_B, factors=True),
    _case("gla-96", (12, 4), (128, 96), False, "channel", checkpoint=_B),
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@every_case
def test_step_and_flush(case, rng):
    assert_verify_is_right(with_drafts(case, 1), rng, 1, 2e-6)
    assert_flush_is_right(with_drafts(case, 1), rng, 2e-6)


@every_case
def test_verify(case, rng):
    for tokens in (5, case.window // 2):
        assert_verify_is_right(with_drafts(case, tokens), rng, tokens, verify_tolerance(case))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[9]], ids=lambda case: case.id)
def test_five_runs_are_bit_equal(case, tokens, rng):
    call = make_call(with_drafts(case, tokens), rng, tokens)
    run = jax.jit(replay_pallas.verify)
    first = run(*call)
    for _ in range(4):
        assert same_bits(first, run(*call))


@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[9]], ids=lambda case: case.id)
def test_state_does_not_drift_over_4096_steps(case, rng):
    """Error of the state after 4,096 tokens against the float32 recurrence on the same inputs, in one compiled loop."""
    case = dataclasses.replace(case, heads=(4, 4 if case.heads[0] == case.heads[1] else 1), max_draft=1)
    tokens = jax.tree.map(jnp.asarray, make_tokens(case, rng, 2, 256))

    def decode(state, implementation):
        def body(state, token):
            state, _ = rs.step(state, jax.tree.map(lambda x: x[:, None], token), implementation=implementation)
            return state, None

        steps = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tokens)
        for _ in range(16):
            state, _ = jax.lax.scan(body, state, steps)
        return rs.materialize(state)

    fresh = rs.init_state(case.recurrence, case.policy, 2)
    got = jax.jit(decode, static_argnums=1)(fresh, "pallas")
    plain = rs.init_state(case.recurrence, dataclasses.replace(case.policy, window=2), 2)
    want = jax.jit(decode, static_argnums=1)(plain, "reference")
    assert relative_error(got, want) <= 1e-5


@pytest.mark.parametrize("rows", [1, 1024])
def test_batches(rows):
    """One row, and grids of more than 65,535 warpgroups."""
    case = _case("gdn", (128, 128), (16, 32), True, "head", max_draft=1, activations=_B)
    state = rs.init_state(case.recurrence, case.policy, rows)
    rng = np.random.default_rng(0)
    for _ in range(3):
        tokens = jax.tree.map(jnp.asarray, make_tokens(case, rng, rows, 1))
        got, out = rs.step(state, tokens, implementation="pallas")
        state, want = rs.step(state, tokens, implementation="xla")
        assert relative_error(out, want) <= 6e-3
        assert relative_error(got.buffer.update, state.buffer.update) <= 1e-5


def test_a_pool_of_more_than_2_31_elements():
    """The last slots of a pool beyond 8 GiB are read and written like the first."""
    case = _case("mamba2", (128, 8), (64, 128), False, "head", max_draft=1, activations=_B)
    slots = 2**31 // (128 * 64 * 128) + 64
    state = rs.init_state(case.recurrence, case.policy, slots)
    tokens = jax.tree.map(jnp.asarray, make_tokens(case, np.random.default_rng(0), 2, 1))
    twice = jax.tree.map(lambda x: jnp.concatenate([x[:1], x[:1]]), tokens)
    ends = jnp.array([0, slots - 1])
    run = jax.jit(lambda state: rs.step(state, twice, ends, implementation="pallas"), donate_argnums=0)
    for _ in range(18):  # over a flush
        state, out = run(state)
        assert same_bits(out[0], out[1])
    assert same_bits(state.checkpoint[0], state.checkpoint[slots - 1])
    assert float(jnp.abs(state.checkpoint[0]).max()) > 0
    assert float(jnp.abs(state.checkpoint[1 : slots - 1 : 64]).max()) == 0
