"""What a policy that leaves ``records`` to the layer keeps: one choice everywhere, which follows the kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import ReplayPolicy, replay_pallas
from replayssm_jax.mixers.cache import init_mixer_cache
from replayssm_jax.sharding import Sharding
from tests.cases import case_named, make_tokens
from tests.compare import same_bits

# family, (V, K), max_draft, and what the ring keeps with records=None, "update" and "raw"
DEFAULTS = [
    ("kda", (128, 128), 1, "update"),
    ("kda", (128, 128), 2, "raw"),
    ("kda", (128, 128), 5, "raw"),
    ("kda", (128, 128), 8, "update"),  # of a window of 16: every other round would fold
    ("kda", (64, 64), 4, "raw"),
    ("kda", (192, 256), 4, "raw"),
    # kernels take these with updates alone, or not at all
    ("kda", (80, 128), 4, "update"),
    ("kda", (128, 96), 4, "update"),
    ("kda", (320, 128), 4, "update"),
    ("kda", (6, 8), 4, "update"),
    # other recurrences gain nothing
    ("gdn", (128, 128), 4, "update"),
    ("gdn", (128, 128), 1, "update"),
    ("mamba2", (64, 128), 4, "inputs"),
    ("gla", (64, 64), 4, "inputs"),
]


def kept(recurrence: rs.Recurrence, policy: ReplayPolicy) -> str:
    """What the arrays of a ring say of its records."""
    buffer = jax.eval_shape(lambda: rs.init_state(recurrence, policy, 1)).buffer
    fields = buffer.update.dtype.name, buffer.weight is not None, buffer.factor is not None
    return {
        ("float32", False, False): "update",
        ("bfloat16", True, True): "raw",
        ("bfloat16", True, False): "inputs",
    }[fields]


def test_float32_keeps_updates():
    """Which are exact to 2e-7 on a GPU, and faster on a CPU."""
    recurrence = case_named("kda", dims=(128, 128)).recurrence
    for record, updates in (("float32", True), ("float16", False), ("bfloat16", False)):
        assert ReplayPolicy(max_draft=4, record_dtype=record).records_updates(recurrence) == updates


@pytest.mark.parametrize(("family", "dims", "max_draft", "default"), DEFAULTS)
def test_what_is_kept_by_default(family, dims, max_draft, default):
    recurrence = case_named(family, dims=dims).recurrence
    policy = ReplayPolicy(max_draft=max_draft, record_dtype="bfloat16")
    assert kept(recurrence, policy) == default
    assert policy.records_updates(recurrence) == (default != "raw")
    for records in ("update", "raw"):
        named = dataclasses.replace(policy, records=records)
        assert kept(recurrence, named) == (records if recurrence.delta_rule else "inputs")
        assert named.records_updates(recurrence) == (records == "update")
    if recurrence.delta_rule:
        assert kept(recurrence, dataclasses.replace(policy, readout="nvfp4" if dims[1] % 16 == 0 else "bf16")) == "raw"


@pytest.mark.parametrize("window", [16, 32])
@pytest.mark.parametrize("record", ["bfloat16", "float32"])
def test_no_layer_loses_the_kernels_to_the_default(window, record):
    """Wherever the kernels serve every call with updates, they serve it with what is kept by default."""
    seen: set[tuple[bool, bool]] = set()
    for key_dim in (32, 64, 96, 128, 192, 256):
        for value_dim in (8, 64, 72, 128, 192, 256, 320):
            case = case_named("kda", heads=(2, 1), dims=(value_dim, key_dim), window=window, activations=record)
            for max_draft in (2, 5, window // 2):
                policy = dataclasses.replace(case.policy, max_draft=max_draft)
                both = [policy, dataclasses.replace(policy, records="update")]
                states = [jax.eval_shape(lambda p=p: rs.init_state(case.recurrence, p, 2)) for p in both]  # noqa: B023
                for count in (None, 1, max_draft):
                    tokens = None if count is None else make_tokens(case, np.random.default_rng(0), 1, count)
                    default, updates = (replay_pallas.unsupported_shape(state, tokens) for state in states)
                    assert default is None or updates is not None, f"{case.dims}, {max_draft=}, T={count}: {default}"
                    seen.add((policy.records_updates(case.recurrence), default is None))
    assert seen >= {(True, True), *([(False, True)] if record == "bfloat16" else [])}, "both choices were to be served"


def test_every_way_to_a_state_keeps_the_same():
    """Pools, mixers' caches and meshes: one rule, and a state of the other kind is refused rather than read as this one."""
    case = case_named("kda", heads=(2, 1), dims=(64, 64), activations="bfloat16")
    state = rs.init_state(case.recurrence, case.policy, 2)
    cache = init_mixer_cache(case.recurrence, case.policy, 2, 4, 8, jnp.dtype("bfloat16"))
    sharded = Sharding(jax.make_mesh((1, 1), ("data", "model"))).init_state(case.recurrence, case.policy, 2)
    for other in (cache, sharded):
        assert jax.tree.map(jnp.shape, other.buffer) == jax.tree.map(jnp.shape, state.buffer)
        assert other.buffer.factor is not None
    assert state.policy == cache.policy == sharded.policy == case.policy
    copied = rs.copy_slots(state, jnp.array([0]), jnp.array([1]))
    assert jax.tree.structure(copied) == jax.tree.structure(state)
    updates = rs.init_state(case.recurrence, dataclasses.replace(case.policy, records="update"), 2)
    with pytest.raises(TypeError, match=r"state\.buffer\.update must be bfloat16, got float32"):
        rs.flush(dataclasses.replace(state, buffer=updates.buffer))


def test_the_default_reads_as_the_named_choice_does(rng):
    """Bit for bit."""
    case = case_named("kda", heads=(2, 1), dims=(64, 64), activations="bfloat16")
    drafts, results = make_tokens(case, rng, 2, 4), []
    for records in (None, "raw"):
        state = rs.init_state(case.recurrence, dataclasses.replace(case.policy, records=records), 2)
        state, out = jax.jit(rs.verify)(state, drafts)
        results.append((state.buffer.update, out))
    assert same_bits(*results)
