"""Every public argument given wrong once: the error has the right type and names the argument, what came and what should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from tests.cases import case_named, make_tokens

CASE = case_named("gdn")  # H, G, V, K = 4, 2, 6, 8; window 16, max_draft 4
STATE = rs.init_state(CASE.recurrence, CASE.policy, 3)
GLA = case_named("gla", activations="float16", factors=True)
ROWS, COUNT = 2, 4
TOKENS = jax.tree.map(jnp.asarray, make_tokens(CASE, np.random.default_rng(0), ROWS, COUNT))
ONE = jax.tree.map(lambda x: x[:, :1], TOKENS)
PAIR = jnp.array([0, 2])


def _recurrence(**wrong):
    fields = {"num_value_heads": 4, "num_key_heads": 2, "key_dim": 8, "value_dim": 6, "delta_rule": True, "gate": "head"}
    return rs.Recurrence(**fields | wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"num_value_heads": 3}, ValueError, "num_value_heads=3 must be divisible by num_key_heads=2"),
        ({"num_value_heads": 4.0}, TypeError, "num_value_heads must be an int, got 4.0"),
        ({"num_key_heads": 0}, ValueError, "num_key_heads must be at least 1, got 0"),
        ({"key_dim": -8}, ValueError, "key_dim must be at least 1, got -8"),
        ({"value_dim": True}, TypeError, "value_dim must be an int, got True"),
        ({"delta_rule": 1}, TypeError, "delta_rule must be True or False, got 1"),
        ({"gate": "key"}, ValueError, "gate must be 'head' or 'channel', got 'key'"),
    ],
)
def test_recurrence(wrong, error, message):
    with pytest.raises(error, match=message):
        _recurrence(**wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"window": 7, "max_draft": 4}, ValueError, r"window=7 must be at least 2 \* max_draft=8"),
        ({"window": 16.0}, TypeError, "window must be an int, got 16.0"),
        ({"max_draft": 0}, ValueError, "max_draft must be at least 1, got 0"),
        ({"checkpoint_dtype": "int8"}, ValueError, "checkpoint_dtype must be one of float32, .*, got int8"),
        ({"checkpoint_dtype": "fp32"}, TypeError, "checkpoint_dtype must be one of float32, .*, got 'fp32'"),
        ({"record_dtype": "float64"}, ValueError, "record_dtype must be one of float32, .*, got float64"),
        ({"readout": "int4"}, ValueError, "readout must be one of checkpoint, .*, got 'int4'"),
        ({"rounding": "up"}, ValueError, "rounding must be one of nearest, stochastic, got 'up'"),
    ],
)
def test_policy(wrong, error, message):
    with pytest.raises(error, match=message):
        rs.ReplayPolicy(**wrong)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rs.init_state(CASE, CASE.policy, 3), TypeError, "recurrence must be a Recurrence, got Case"),
        (lambda: rs.init_state(CASE.recurrence, 16, 3), TypeError, "policy must be a ReplayPolicy, got int"),
        (lambda: rs.init_state(CASE.recurrence, CASE.policy, 0), ValueError, "num_slots must be at least 1, got 0"),
        (lambda: rs.init_pointer(2.0, 16, 4), TypeError, "num_slots must be an int, got 2.0"),
        (lambda: rs.init_pointer(2, -1, 4), ValueError, "window must be at least 1, got -1"),
        (lambda: rs.init_pointer(2, 16, None), TypeError, "max_draft must be an int, got None"),
        (lambda: rs.init_pointer(2, 7, 4), ValueError, r"window=7 must be at least 2 \* max_draft=8"),
    ],
)
def test_init(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Doors that take tokens, each with tokens it accepts and a T that it does not.
DOORS = {"verify": (rs.verify, TOKENS), "step": (rs.step, ONE), "prefill": (rs.prefill, TOKENS)}
WRONG_TOKENS = [
    ("q", lambda x: x[0], ValueError, r"tokens\.q must be \[B, T, G, K\], got shape"),
    ("q", lambda x: x[:, :0], ValueError, r"tokens\.q must hold at least one token"),
    ("q", lambda x: x[..., :-1], ValueError, r"tokens\.q must have shape \(2, ., 2, 8\), got \(2, ., 2, 7\)"),
    ("q", lambda x: x.astype(int), TypeError, r"tokens\.q must be float32 or bfloat16 or float16, got int32"),
    ("k", lambda x: x[:, :, :1], ValueError, r"tokens\.k must have shape \(2, ., 2, 8\), got \(2, ., 1, 8\)"),
    ("k", lambda x: x.astype(jnp.int8), TypeError, r"tokens\.k must be float32 or bfloat16 or float16, got int8"),
    ("k", lambda x: np.ndarray.tolist(np.asarray(x)), TypeError, r"tokens\.k must be an array, got list"),
    ("v", lambda x: x[:1], ValueError, r"tokens\.v must have shape \(2, ., 4, 6\), got \(1, ., 4, 6\)"),
    ("v", lambda x: x.astype(jnp.complex64), TypeError, r"tokens\.v must be .*, got complex64"),
    ("log_decay", lambda x: x[..., None], ValueError, r"tokens\.log_decay must have shape \(2, ., 4\), got \(2, ., 4, 1\)"),
    ("log_decay", lambda x: x.astype(jnp.bfloat16), TypeError, r"tokens\.log_decay must be float32, got bfloat16"),
    ("beta", lambda x: x[..., :2], ValueError, r"tokens\.beta must have shape \(2, ., 4\), got \(2, ., 2\)"),
    ("beta", lambda x: x.astype(jnp.float16), TypeError, r"tokens\.beta must be float32, got float16"),
    ("q_scale", lambda x: jnp.ones((2, 1, 4)), ValueError, r"tokens\.q_scale must have shape \(2, ., 2\), got \(2, 1, 4\)"),
    ("k_scale", lambda x: 1.0, TypeError, r"tokens\.k_scale must be an array, got float"),
]


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize(("field", "spoil", "error", "message"), WRONG_TOKENS)
def test_tokens(name, field, spoil, error, message):
    door, tokens = DOORS[name]
    with pytest.raises(error, match=message):
        door(STATE, dataclasses.replace(tokens, **{field: spoil(getattr(tokens, field))}))


WRONG_ROWS = [
    ({"slots": jnp.array([0.0, 1.0])}, TypeError, "slots must be integers, got float32"),
    ({"slots": jnp.array([True, False])}, TypeError, "slots must be integers, got bool"),
    ({"slots": PAIR[None]}, ValueError, r"slots must be a vector \[B\], got shape \(1, 2\)"),
    ({"slots": jnp.arange(3)}, ValueError, r"slots must have one entry per row, shape \(2,\), got \(3,\)"),
    ({"lengths": jnp.array([1.0, 1.0])}, TypeError, "lengths must be integers, got float32"),
    ({"lengths": jnp.arange(3)}, ValueError, r"lengths must have one entry per row, shape \(2,\), got \(3,\)"),
    ({"implementation": "triton"}, ValueError, "implementation must be None or one of reference, xla, pallas, got 'triton'"),
]


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize(("wrong", "error", "message"), WRONG_ROWS)
def test_rows(name, wrong, error, message):
    door, tokens = DOORS[name]
    with pytest.raises(error, match=message):
        door(STATE, tokens, **wrong)


@pytest.mark.parametrize("name", DOORS)
def test_tokens_of_another_kind(name):
    door, tokens = DOORS[name]
    with pytest.raises(TypeError, match="tokens must be Tokens, got dict"):
        door(STATE, dataclasses.asdict(tokens))
    with pytest.raises(ValueError, match="slots=None puts row b in slot b, but there are 2 rows and 1 slots"):
        door(rs.init_state(CASE.recurrence, CASE.policy, 1), tokens)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rs.step(STATE, TOKENS), ValueError, "tokens must hold one token per row for a step, got T=4"),
        (lambda: rs.prefill(STATE, TOKENS, chunk_size=0), ValueError, "chunk_size must be at least 1, got 0"),
        (lambda: rs.prefill(STATE, TOKENS, chunk_size=8.0), TypeError, "chunk_size must be an int, got 8.0"),
        (lambda: rs.flush(STATE, PAIR * 1.0), TypeError, "slots must be integers, got float32"),
        (lambda: rs.flush(STATE, jnp.int32(1)), ValueError, r"slots must be a vector \[B\], got shape \(\)"),
        (lambda: rs.flush(STATE, where=jnp.arange(3)), TypeError, "where must be bool, got int32"),
        (lambda: rs.flush(STATE, PAIR, where=jnp.ones(3, bool)), ValueError, r"where must .*, shape \(2,\), got \(3,\)"),
        (lambda: rs.flush(STATE, implementation="cuda"), ValueError, "implementation must be None or one of .*, got 'cuda'"),
        (lambda: rs.materialize(STATE, PAIR[None]), ValueError, r"slots must be a vector \[B\], got shape \(1, 2\)"),
        (lambda: rs.materialize(STATE, PAIR * 1.0), TypeError, "slots must be integers, got float32"),
        (lambda: rs.reset(STATE, PAIR * 1.0), TypeError, "slots must be integers, got float32"),
        (lambda: rs.reset(STATE, jnp.int32(0)), ValueError, r"slots must be a vector \[B\], got shape \(\)"),
        (lambda: rs.copy_slots(STATE, PAIR * 1.0, PAIR), TypeError, "source must be integers, got float32"),
        (lambda: rs.copy_slots(STATE, PAIR, PAIR[None]), ValueError, r"target must be a vector \[B\], got shape \(1, 2\)"),
        (lambda: rs.copy_slots(STATE, PAIR, PAIR[:1]), ValueError, r"source and target .*, got \(2,\) and \(1,\)"),
        (lambda: rs.commit(STATE.pointer, 1.5), TypeError, "accepted must be integers, got float32"),
        (lambda: rs.commit(STATE.pointer, PAIR[None]), ValueError, r"accepted must have one entry per row, .*got \(1, 2\)"),
        (lambda: rs.commit(STATE.pointer, PAIR, PAIR * 1.0), TypeError, "slots must be integers, got float32"),
        (lambda: rs.commit(STATE.pointer, PAIR, jnp.arange(3)), ValueError, r"slots .*shape \(2,\), got \(3,\)"),
        (lambda: rs.after_verify(STATE.pointer, PAIR * 1.0), TypeError, "slots must be integers, got float32"),
        (lambda: rs.after_verify(STATE.pointer, PAIR, jnp.arange(3)), ValueError, r"slots .*shape \(3,\), got \(2,\)"),
        (lambda: rs.after_verify(STATE.pointer, PAIR, PAIR * 1.0), TypeError, "lengths must be integers, got float32"),
        (lambda: rs.after_prefill(STATE.pointer, PAIR * 1.0, PAIR), TypeError, "slots must be integers, got float32"),
        (lambda: rs.after_prefill(STATE.pointer, PAIR, PAIR * 1.0), TypeError, "lengths must be integers, got float32"),
        (lambda: rs.reset_pointer(STATE.pointer, PAIR * 1.0), TypeError, "slots must be integers, got float32"),
    ],
)
def test_other_doors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("call", [rs.verify, rs.step, rs.prefill], ids=lambda door: door.__name__)
def test_state_of_another_kind(call):
    with pytest.raises(TypeError, match="state must be a ReplayState, got tuple"):
        call((STATE,), ONE)


@pytest.mark.parametrize(
    "call",
    [rs.flush, rs.materialize, lambda s: rs.reset(s, PAIR), lambda s: rs.copy_slots(s, PAIR, PAIR)],
    ids=["flush", "materialize", "reset", "copy_slots"],
)
def test_state_of_another_kind_without_tokens(call):
    with pytest.raises(TypeError, match="state must be a ReplayState, got Array"):
        call(STATE.checkpoint)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: rs.commit(p, 1),
        rs.after_verify,
        lambda p: rs.after_prefill(p, None, PAIR),
        lambda p: rs.reset_pointer(p, PAIR),
    ],
    ids=["commit", "after_verify", "after_prefill", "reset_pointer"],
)
def test_pointer_of_another_kind(call):
    """The likely mistake: the whole state where its pointer belongs."""
    with pytest.raises(TypeError, match="pointer must be a ReplayPointer, got ReplayState"):
        call(STATE)


WRONG_STATES = [
    ({"checkpoint": STATE.checkpoint[0]}, ValueError, r"state\.checkpoint must be \[N, H, V, K\], got shape \(4, 6, 8\)"),
    ({"checkpoint": jnp.swapaxes(STATE.checkpoint, 2, 3)}, ValueError, r"state\.checkpoint must have shape \(3, 4, 6, 8\)"),
    ({"checkpoint": STATE.checkpoint.astype(jnp.bfloat16)}, TypeError, r"state\.checkpoint must be float32, got bfloat16"),
    ({"pointer": rs.init_pointer(2, 16, 4)}, ValueError, r"state\.pointer\.length must have shape \(3,\), got \(2,\)"),
    ({"pointer": rs.init_pointer(3, 32, 4)}, ValueError, r"state\.pointer has window=32, max_draft=4, .* window=16"),
    ({"policy": rs.ReplayPolicy(window=32, max_draft=4)}, ValueError, "window"),
    ({"recurrence": case_named("kda").recurrence}, ValueError, r"state\.buffer\.log_decay must have shape"),
    ({"recurrence": case_named("mamba2").recurrence}, ValueError, r"state\.buffer\.weight"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG_STATES)
def test_state_whose_parts_disagree(wrong, error, message):
    with pytest.raises(error, match=message):
        rs.materialize(dataclasses.replace(STATE, **wrong))


WRONG_BUFFERS = {
    "key": STATE.buffer.key[:, :, :-1],
    "update": STATE.buffer.update[..., :-1],
    "log_decay": STATE.buffer.log_decay[:2],
}


@pytest.mark.parametrize("field", WRONG_BUFFERS)
def test_scratch_ring_of_another_shape(field):
    buffer = dataclasses.replace(STATE.buffer, **{field: WRONG_BUFFERS[field]})
    with pytest.raises(ValueError, match=rf"state\.buffer\.{field} must have shape .*, got"):
        rs.verify(dataclasses.replace(STATE, buffer=buffer), TOKENS)
