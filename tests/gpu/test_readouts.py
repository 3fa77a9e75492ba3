"""Read-out copies, raw records and rounding by chance on a Hopper GPU at real geometries; skipped elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from pallas_kernels.hopper import cut
from replayssm_jax import replay_pallas
from replayssm_jax.readout import PLANE
from tests.cases import Case, make_tokens
from tests.compare import relative_error, same_bits
from tests.lockstep import whole_checkpoint
from tests.read_runs import OUTPUT_ROUNDING, assert_read_flush_is_right, assert_read_is_right, make_read_call
from tests.refresh_runs import assert_chance_is_right, make_state

pytestmark = pytest.mark.skipif(replay_pallas.missing_gpu() is not None, reason=str(replay_pallas.missing_gpu()))


def _case(id, heads, dims, delta_rule, gate, **rest):
    return Case(id=id, heads=heads, dims=dims, delta_rule=delta_rule, gate=gate, max_draft=1, **rest)


_B, _H = "bfloat16", "float16"
_ALL = ("bf16", "fp8_e4m3", "nvfp4")
_CHANCE = {"checkpoint": _H, "rounding": "stochastic", "activations": _H}
GDN = _case("gdn", (64, 16), (128, 128), True, "head", factors=True, activations=_B)
KDA = _case("kda", (32, 32), (128, 128), True, "channel", factors=True, activations=_B)
MAMBA2 = _case("mamba2", (128, 8), (64, 128), False, "head", activations=_B)
CASES = (
    (GDN, (*_ALL, PLANE)),
    (KDA, (*_ALL, PLANE)),
    (MAMBA2, (*_ALL, PLANE)),
    (_case("gdn-f32", (12, 4), (128, 128), True, "head", window=32), _ALL),
    (_case("kda-f32", (12, 12), (128, 128), True, "channel", window=32), _ALL),
    (_case("gdn-64", (12, 12), (64, 64), True, "head", window=32), _ALL),
    (_case("kda-64", (12, 4), (64, 64), True, "channel", activations=_B, checkpoint=_B), ("nvfp4", "fp8_e4m3")),
    (_case("mamba2-n256", (48, 1), (64, 256), False, "head", activations=_B, window=32), _ALL),
    (_case("gdn-256", (8, 8), (256, 256), True, "head", window=32, **_CHANCE), ("nvfp4", "fp8_e4m3")),
    (_case("gdn-192", (6, 6), (192, 128), True, "head", beta_max=2.0, activations=_B), ("nvfp4",)),
    (_case("gla", (12, 12), (64, 64), False, "channel", factors=True), ("fp8_e4m3",)),
    (_case("gdn-raw", (64, 16), (128, 128), True, "head", factors=True, activations=_B, records="raw"), ("checkpoint",)),
    (_case("kda-raw", (32, 32), (128, 128), True, "channel", factors=True, activations=_B, records="raw"), ("checkpoint",)),
    (_case("kda-raw-bf16", (12, 12), (128, 128), True, "channel", checkpoint=_B, records="raw"), ("checkpoint",)),
    (_case("mamba2-chance", (128, 8), (64, 128), False, "head", **_CHANCE), ("checkpoint", "nvfp4")),
)
with_formats = pytest.mark.parametrize(
    "case",
    [dataclasses.replace(case, id=f"{case.id}-{form}", readout=form) for case, forms in CASES for form in forms],
    ids=lambda case: case.id,
)
families = pytest.mark.parametrize("case", [GDN, KDA, MAMBA2], ids=lambda case: case.id)


@with_formats
@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_verify(case, tokens, rng, monkeypatch):
    if tokens < 9:  # cut as for many rows: several heads a warpgroup
        monkeypatch.setattr(cut, "_MULTIPROCESSORS", 1)
    if 2 * tokens > case.window:
        case = dataclasses.replace(case, window=32)
    assert_read_is_right(case, rng, tokens, 2e-5)


@pytest.mark.parametrize("case", [case for case, _ in CASES if case.rounding == "nearest"], ids=lambda case: case.id)
def test_flushed_checkpoints_do_not_depend_on_the_copy(case, rng):
    seed, pools = int(rng.integers(2**31)), []
    for form in ("checkpoint", *_ALL, PLANE) if case.checkpoint == "float32" else ("checkpoint", *_ALL):
        changed = dataclasses.replace(case, readout=form, records="raw")
        state = make_state(changed, np.random.default_rng(seed), [case.window - 1, 1, 3, 0])
        if replay_pallas.unsupported_shape(state) is None:
            pools.append(whole_checkpoint(assert_read_flush_is_right(state, np.array([True, True, False, True]), 2e-5)))
    assert len(pools) > 2
    assert all(same_bits(pools[0], pool) for pool in pools[1:])


@pytest.mark.parametrize("tokens", [1, 5])
@families
def test_verified_checkpoints_do_not_depend_on_the_copy(case, tokens, rng):
    """Though rows that are folded are answered in one kernel where the checkpoint is read, and in two where a copy is."""
    seed, pools = int(rng.integers(2**31)), []
    for form in ("checkpoint", "nvfp4"):
        call = make_read_call(dataclasses.replace(case, readout=form, records="raw"), np.random.default_rng(seed), tokens)
        after, _ = jax.jit(replay_pallas.verify)(*call)
        pools.append((after.checkpoint, after.buffer))
    assert same_bits(*pools)


@pytest.mark.parametrize("case", [case for case, _ in CASES if case.rounding == "stochastic"], ids=lambda case: case.id)
def test_rounding_by_chance_is_the_one_written_down(case, rng):
    state = make_state(dataclasses.replace(case, readout="fp8_e4m3"), rng, [case.window - 1, 1, 3])
    slots, lengths = np.arange(3, dtype=np.int32), np.ones(3, np.int32)
    after = assert_read_flush_is_right(state, lengths > 0, 2e-5)
    assert_chance_is_right(state, slots, lengths, after)


@pytest.mark.parametrize("tokens", [1, 5])
@families
def test_five_runs_are_bit_equal(case, tokens, rng):
    call = make_read_call(dataclasses.replace(case, readout="nvfp4"), rng, tokens)
    run = jax.jit(replay_pallas.verify)
    first = run(*call)
    for _ in range(4):
        assert same_bits(first, run(*call))


@pytest.mark.parametrize("readout", ["fp8_e4m3", "nvfp4"])
@families
def test_256_steps_in_a_compiled_loop(case, readout, rng):
    """Against the backend in jnp; a last bit of a checkpoint may turn a code of its copy, which one output in many notices."""
    case = dataclasses.replace(case, readout=readout)
    tokens = jax.tree.map(lambda x: jnp.swapaxes(jnp.asarray(x), 0, 1), make_tokens(case, rng, 4, 256))

    @functools.partial(jax.jit, static_argnums=2)
    def decode(state, tokens, implementation):
        def body(state, token):
            return rs.step(state, jax.tree.map(lambda x: x[:, None], token), implementation=implementation)

        return jax.lax.scan(body, state, tokens)

    fresh = rs.init_state(case.recurrence, case.policy, 4)
    (got, out), (want, want_out) = (decode(fresh, tokens, implementation) for implementation in ("pallas", "xla"))
    assert relative_error(rs.materialize(got), rs.materialize(want)) <= 1e-5
    assert relative_error(out, want_out) <= OUTPUT_ROUNDING[case.activations] + 2e-3
    assert same_bits(got.buffer, want.buffer)
    assert same_bits(got.pointer, want.pointer)
