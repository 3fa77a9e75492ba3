"""A read-out copy touches outputs and nothing else: with or without it, the recurrence goes through the same bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from tests import oracle
from tests.cases import FAMILIES, Case, case_named, make_tokens
from tests.compare import relative_error, same_bits
from tests.lockstep import FAST_COMPILE, jitted, whole_checkpoint
from tests.test_readout import decode as decode_readout

# every family with a copy, every format, and roundings of the checkpoint below it
PAIRS = [
    pytest.param("gdn", {"readout": "nvfp4", "factors": True}, marks=pytest.mark.optimised),
    ("kda", {"readout": "bf16_plane", "activations": "bfloat16"}),
    # their parts are in the other rows
    pytest.param("gdn", {"readout": "bf16"}, marks=pytest.mark.long),
    pytest.param("mamba2", {"readout": "nvfp4", "checkpoint": "float16"}, marks=pytest.mark.long),
    ("gla", {"readout": "fp8_e4m3", "checkpoint": "bfloat16", "rounding": "stochastic"}),
]


def run_program(state: rs.ReplayState, prompt: rs.Tokens, turns: dict[str, jax.Array]) -> tuple[rs.ReplayState, jax.Array]:
    """A prompt, then turns of drafts, acceptance, single tokens, flushes and copies. The pool, and all drafts' outputs."""
    state, _ = rs.prefill(state, prompt, jnp.array([2, 0, -1]), jnp.array([7, 4, 7]))

    def body(state: rs.ReplayState, turn: dict[str, jax.Array]) -> tuple[rs.ReplayState, jax.Array]:
        state, out = rs.verify(state, turn["drafts"], turn["slots"], turn["lengths"])
        state = dataclasses.replace(state, pointer=rs.commit(state.pointer, turn["accepted"], turn["slots"]))
        state, _ = rs.step(state, turn["token"], turn["slots"], turn["ones"])
        state = rs.flush(state, turn["slots"], turn["where"])
        return rs.copy_slots(state, turn["source"], turn["target"]), out

    return jax.lax.scan(body, state, turns)


def random_turns(case: Case, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Ragged rows in changing slots, some of them padding; a flush of a row in five turns, a copy in six."""

    def turn() -> dict[str, jax.Array]:
        lengths = rng.integers(0, case.max_draft + 1, 3)
        source = rng.permutation(4)[:2] if rng.random() < 1 / 6 else [4, 4]
        return {
            "drafts": make_tokens(case, rng, 3, case.max_draft),
            "token": make_tokens(case, rng, 3, 1),
            "slots": rng.permutation([0, 1, 2, 3, -1, 9])[:3],
            "lengths": lengths,
            "accepted": rng.integers(0, lengths + 1),
            "ones": rng.integers(0, 2, 3),
            "where": rng.random(3) < 0.2,
            "source": np.array(source),
            "target": np.array(source)[::-1],
        }

    return jax.tree.map(lambda *x: np.stack(x), *(turn() for _ in range(count)))


@pytest.mark.parametrize(("family", "changes"), PAIRS, ids=lambda x: x if isinstance(x, str) else x["readout"])
def test_the_checkpoint_is_bit_equal_with_and_without_a_copy(family, changes, rng):
    case = case_named(family, window=8, **changes)
    prompt, turns = make_tokens(case, rng, 3, 7), random_turns(case, rng, 40)
    # one family is optimised as in use: fusing a fold with the copy's encoding must not change it
    run = jax.jit(run_program)
    pools, outs = [], []
    for c in (case, dataclasses.replace(case, readout="checkpoint", records="raw")):
        state, out = run(rs.init_state(c.recurrence, c.policy, 4), prompt, turns)
        pools.append(state)
        outs.append(out)
    assert int(pools[0].pointer.origin.max()) > 16
    assert 1e-4 < relative_error(*outs) < 0.5, "the copy was never read, or badly"
    kept = [(whole_checkpoint(pool), pool.buffer, pool.pointer) for pool in pools]
    assert same_bits(*kept), "the copy left its mark on a checkpoint, a record or a pointer"
    assert same_bits(*map(jitted("materialize"), pools))


def test_raw_records_and_recorded_updates_agree(rng):
    """What raw records cost is arithmetic: the same states and outputs to rounding."""
    case = case_named("kda")
    pools = [rs.init_state(case.recurrence, dataclasses.replace(case.policy, records=r), 2) for r in ("update", "raw")]
    for _ in range(12):
        drafts = make_tokens(case, rng, 2, 4)
        pools, outs = zip(*(jitted("verify")(pool, drafts) for pool in pools), strict=True)
        assert relative_error(outs[1], outs[0]) < 3e-6
        pools = [dataclasses.replace(p, pointer=jitted("commit")(p.pointer, np.int32([4, 2]))) for p in pools]
    present = [jitted("materialize")(pool) for pool in pools]
    assert relative_error(present[1], present[0]) < 3e-6


@pytest.mark.parametrize(("family", "form"), [("gdn", "nvfp4"), ("gla", "fp8_e4m3")])
def test_a_read_is_of_the_copy_and_the_records_behind_it(family, form, rng):
    """Within a window outputs are those of the recurrence from the copy, to float32's digits; drafts see each other."""
    case = case_named(family, readout=form, window=24)
    state, _ = jitted("prefill")(rs.init_state(case.recurrence, case.policy, 2), make_tokens(case, rng, 2, 9))
    read = np.asarray(decode_readout(form, state.readout, case.recurrence.key_dim), np.float64)
    assert relative_error(read, state.checkpoint) > 1e-4
    for _ in range(3):
        drafts = make_tokens(case, rng, 2, 4)
        state, out = jitted("verify")(state, drafts)
        for row in range(2):
            _, want = oracle.run(case.recurrence, read[row], drafts, row)
            assert relative_error(out[row], want) < 1e-5
            kept = jax.tree.map(lambda x: x[:, :3], drafts)
            read[row], _ = oracle.run(case.recurrence, read[row], kept, row)
        state = dataclasses.replace(state, pointer=jitted("commit")(state.pointer, np.int32([3, 3])))


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def _decode_all(state: rs.ReplayState, tokens: rs.Tokens) -> tuple[rs.ReplayState, jax.Array]:
    """Tokens [rounds, B, T, ...] as drafts of which all are accepted. Outputs [rounds, B, T, H, V]"""

    def body(state, drafts):
        state, out = rs.verify(state, drafts)
        return dataclasses.replace(state, pointer=rs.commit(state.pointer, drafts.q.shape[1])), out

    return jax.lax.scan(body, state, tokens)


def test_4096_steps_read_from_nvfp4_and_the_error_stays_flat(rng):
    """The state stays on the recurrence, and outputs are as far off at the end as they are at the beginning."""
    case = case_named("gdn", heads=(2, 1), dims=(12, 16), max_draft=8, activations="bfloat16", decay="slow")
    tokens = make_tokens(case, rng, 1, 4096)
    rounds = jax.tree.map(lambda x: x.reshape(512, 1, 8, *x.shape[2:]), tokens)
    states, outs = [], []
    for c in (case, dataclasses.replace(case, readout="nvfp4")):
        state, out = _decode_all(rs.init_state(c.recurrence, c.policy, 1), rounds)
        states.append(jitted("materialize")(state))
        outs.append(np.asarray(out, np.float64))
    assert relative_error(states[1], states[0]) < 2e-6
    errors = [relative_error(outs[1][i : i + 64], outs[0][i : i + 64]) for i in range(0, 512, 64)]
    assert 1e-3 < max(errors) < 0.25
    assert max(errors[4:]) < 1.5 * max(errors[1:4])


def test_a_layer_without_a_copy_keeps_its_arrays():
    """Existing pools, their shapes and their order of leaves, are what they were; only a policy with a copy adds to them."""
    for family in FAMILIES:
        plain = rs.init_state(family.recurrence, family.policy, 2)
        assert plain.readout is None
        assert plain.buffer.factor is None
        names = ["checkpoint", "key", "update", "log_decay", "length", "origin", "request"]
        names[3:3] = [] if family.delta_rule else ["weight"]
        assert [path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path(plain)] == names
        raw = dataclasses.replace(family.policy, records="raw")
        grown = rs.init_state(family.recurrence, raw, 2)
        assert (jax.tree.structure(grown.buffer) == jax.tree.structure(plain.buffer)) == (not family.delta_rule)
