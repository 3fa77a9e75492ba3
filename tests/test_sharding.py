"""States, models and weights on a device mesh: the same answers, no pool on its way between devices, named errors."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import replayssm_jax as rs
from replayssm_jax.models import from_pretrained, weights
from replayssm_jax.models.parameter import PublishedParameter
from replayssm_jax.models.qwen3_next import Qwen3Next
from replayssm_jax.sharding import Sharding
from tests.cases import case_named, make_tokens
from tests.golden_data import ROOT

RUNS = {
    "states": ["state:2:4", "rounded:2:4"],
    "one axis": ["qwen3_5:8:1", "qwen3_5:1:8"],
    "heads": ["kimi_linear:2:4:prompt", "mamba2:1:8"],
    "experts": ["qwen3_next:2:4"],
    "more experts": ["nemotron_h:2:4:prompt"],
    "engine": ["engine:2:4"],
}
KEY_HEADS = {
    "qwen3_next:2:4": 4,
    "kimi_linear:2:4:prompt": 4,
    "nemotron_h:2:4:prompt": 4,
    "qwen3_5:1:8": 2,
    "mamba2:1:8": 8,
}


LONG = ("one axis", "experts", "more experts", "engine")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in RUNS])
def test_mesh_answers_as_one_device(name):
    """Logits to 1e-5 of the largest; pointers equal; in place; and no pool, checkpoints among them, is sent anywhere."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-m", "tests.sharded_runs", *RUNS[name]]
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line["request"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(found) == RUNS[name]
    for request, run in found.items():
        if request.startswith("rounded"):
            assert run["nonzero"] > 0.5
            assert run["differ"] < 1e-3, "a device rounded its heads or slots by numbers of its own"
            continue
        if request.startswith("engine"):
            assert run["equal"]
            continue
        assert run["error"] <= 1e-5, request
        assert run["pointers"], request
        if request.startswith("state"):
            assert run["stray_rows_are_padding"]
            assert run["collectives"] == {}, "heads of a state have nothing to tell each other"
            continue
        data, model = map(int, request.split(":")[1:3])
        assert max(run["collectives"].values(), default=0) < run["smallest_pool"], request
        assert bool(run["collectives"]) == (model > 1), "data shards have nothing to tell each other"
        assert run["aliased"] >= run["pool_bytes"], request
        assert run["checkpoint"][0] == 256 // data
        assert run["key_heads"] == KEY_HEADS.get(request, run["key_heads"])


def one_by_one() -> Sharding:
    return Sharding(jax.make_mesh((1, 1), ("data", "model")))


def test_mesh_of_one_device_is_one_device(rng):
    """The same program as far as numbers go, in this process."""
    case, sharding = case_named("gdn"), one_by_one()
    one, many = rs.init_state(case.recurrence, case.policy, 4), sharding.init_state(case.recurrence, case.policy, 4)
    tokens = jax.tree.map(jnp.asarray, make_tokens(case, rng, 4, 1))
    for got, want in zip(sharding.step(many, tokens), rs.step(one, tokens), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


def abstract(data: int, model: int) -> Sharding:
    """A mesh of one real device as far as its sizes are asked for only."""

    class Sizes(Sharding):
        data_size, model_size = data, model  # type: ignore[assignment]

    return Sizes(one_by_one().mesh)


@pytest.mark.parametrize(
    ("heads", "groups", "size", "kept"),
    [
        (8, 2, 4, 4),
        (8, 1, 8, 8),
        (48, 16, 2, 16),
        (48, 16, 16, 16),
        (12, 3, 2, 6),
        (4, 2, 8, 2),
        (30, 30, 4, 30),
        (64, 8, 16, 16),
    ],
)
def test_key_heads_are_repeated_until_they_divide(heads, groups, size, kept):
    """Unless the value heads do not divide: then nothing is split."""
    r = rs.Recurrence(num_value_heads=heads, num_key_heads=groups, key_dim=8, value_dim=8, delta_rule=False, gate="head")
    assert abstract(1, size).split(r).num_key_heads == kept


def test_errors_name_what_does_not_fit(rng):
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got int"):
        Sharding.of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mesh must have the axes 'data' and 'model', got \('x',\)"):
        from_pretrained(ROOT / "mamba2", mesh=jax.make_mesh((1,), ("x",)))
    case, sharding = case_named("gdn"), abstract(4, 1)
    with pytest.raises(ValueError, match=r"num_slots=6 must be divisible by the mesh's axis 'data' of size 4"):
        sharding.init_state(case.recurrence, case.policy, 6)
    state = rs.init_state(case.recurrence, case.policy, 8)
    tokens = jax.tree.map(jnp.asarray, make_tokens(case, rng, 6, 1))
    with pytest.raises(ValueError, match=r"rows of the batch=6 must be divisible by the mesh's axis 'data'"):
        sharding.step(state, tokens, jnp.arange(6))
    with pytest.raises(ValueError, match=r"slots=None puts row b in slot b, which over a data axis takes 8 rows, got 4"):
        sharding.step(state, jax.tree.map(lambda x: x[:4], tokens))
    with pytest.raises(ValueError, match=r"tokens\.v must have shape"):
        sharding.step(state, jax.tree.map(lambda x: x[:, :, :1], tokens))


@pytest.mark.parametrize("folder", ["qwen3_next", "kimi_linear"])
def test_any_part_of_a_parameter_is_read_without_the_rest(folder, rng, monkeypatch):
    """Joined, interleaved, stacked and transposed tensors: parts are those of the whole, and no more rows are read."""
    checkpoint, tensors = weights.Checkpoint(ROOT / folder), load_file(ROOT / folder / "model.safetensors")
    model = from_pretrained(ROOT / folder)
    read = []
    original = weights.Checkpoint.read_slice
    monkeypatch.setattr(
        weights.Checkpoint, "read_slice", lambda self, *a: read.append(original(self, *a)) or read[-1]
    )  # what is read, in numbers
    for path, source in type(model).published_sources(model.config).items():
        whole = source.layout(*(tensors[name] for name in source.names))
        parameter = PublishedParameter(source, list(source.names), checkpoint)
        assert parameter.shape == whole.shape, path
        for _ in range(3):
            ends = [np.sort(rng.choice(size + 1, 2, replace=False)) for size in whole.shape]
            index = tuple(slice(int(start), int(stop)) for start, stop in ends)
            read.clear()
            np.testing.assert_array_equal(parameter.part(index), whole[index], err_msg=path)
            if all(tensors[name].ndim <= 2 for name in source.names):
                assert sum(x.size for x in read) == whole[index].size, path


def test_where_parameters_lie():
    """Projections and experts over the model axis; what does not divide, vectors and routers whole."""
    from replayssm_jax.models.placement import parameter_sharding

    model = nnx.eval_shape(lambda: Qwen3Next(from_pretrained(ROOT / "qwen3_next").config, rngs=nnx.Rngs(0)))
    sharding = abstract(1, 4)
    specs = {
        ".".join(map(str, path)): parameter_sharding(sharding, path, leaf.get_value().shape).spec
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    assert specs["embed_tokens"] == P("model", None)
    assert specs["lm_head.kernel"] == specs["layers.0.mixer.in_proj_qkv.kernel"] == P(None, "model")
    assert specs["layers.3.mixer.o_proj.kernel"] == specs["layers.0.mixer.out_proj.kernel"] == P("model", None)
    assert specs["layers.0.mlp.experts.up_proj"] == P("model", None, None)
    assert specs["layers.0.mixer.conv1d.weight"] == P(None, "model")
    assert (
        specs["layers.0.mixer.A_log"]
        == specs["layers.0.mlp.gate.weight"]
        == specs["layers.0.mlp.shared_expert_gate.kernel"]
        == P()
    )
