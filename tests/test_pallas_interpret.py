"""The GPU kernels in Mosaic's interpret mode, which runs on a CPU and finds races: every kernel, every switch, tiny shapes."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import hopper
from tests.cases import Case
from tests.kernel_runs import INTERPRET, assert_flush_is_right, assert_verify_is_right, verify_tolerance, with_drafts


def _case(id, heads, dims, delta_rule, gate, **rest):
    return Case(id=id, heads=heads, dims=dims, delta_rule=delta_rule, gate=gate, records="update", **rest)


# together: both gates, both delta rules, all dtypes, both windows, grouped heads, tiles of fewer than 64 rows, several tiles a
# head, keys that fill the warpgroup and keys that do not
STEPS = (
    _case("gdn", (4, 2), (16, 32), True, "head", factors=True, activations="bfloat16"),
    _case("gdn-two-tiles", (1, 1), (80, 64), True, "head", window=32, checkpoint="bfloat16"),
    _case("kda", (2, 2), (64, 128), True, "channel", activations="float16", checkpoint="float16"),
    _case("mamba2", (2, 1), (24, 96), False, "head", activations="bfloat16", beta_max=3.0),
    _case("gla", (2, 1), (8, 32), False, "channel"),
)
VERIFIES = (
    (STEPS[0], 5),
    (STEPS[1], 9),
    (STEPS[2], 3),
    (STEPS[3], 8),
    (STEPS[4], 2),
)


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.id)
def test_step(case, rng, no_races):
    assert_verify_is_right(with_drafts(case, 1), rng, 1, 2e-6, INTERPRET)


@pytest.mark.parametrize(("case", "tokens"), VERIFIES, ids=lambda value: getattr(value, "id", value))
def test_verify(case, tokens, rng, no_races):
    assert_verify_is_right(with_drafts(case, tokens), rng, tokens, verify_tolerance(case), INTERPRET)


@pytest.mark.parametrize("case", STEPS[2:4], ids=lambda case: case.id)
def test_flush(case, rng, no_races):
    assert_flush_is_right(with_drafts(case, 4), rng, 2e-6, INTERPRET)


def test_a_race_is_found():
    """The detector sees a kernel that reads a copy before it has arrived."""

    def body(x, out, buffer, arrived):
        plgpu.copy_gmem_to_smem(x, buffer, arrived)
        out[...] = buffer[...]
        plgpu.barrier_wait(arrived)

    kernel = plgpu.kernel(
        body,
        out_type=jnp.zeros(128, jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
        interpret=INTERPRET,
    )
    try:
        kernel(jnp.ones(128, jnp.float32))
        found = gpu_callbacks.get_races().races_found
    except Exception as error:
        found = "race" in str(error).lower()
    gpu_callbacks.reset_gpu_interpret_mode_state()
    assert found


@pytest.mark.parametrize(
    ("value_dim", "rows", "tiles"), [(64, 64, 1), (80, 40, 2), (128, 64, 2), (192, 64, 3), (8, 8, 1), (72, 24, 3)]
)
def test_tiles_divide_the_values(value_dim, rows, tiles):
    sizes = dict.fromkeys(("rows", "slots", "tokens", "value_heads", "key_heads", "max_draft"), 1)
    dtypes = dict.fromkeys(("checkpoint_dtype", "record_dtype", "value_dtype"), np.dtype("float32"))
    kind = {"window": 16, "key_dim": 64, "delta_rule": True, "channel_gate": False}
    geometry = hopper.Geometry(value_dim=value_dim, **sizes, **dtypes, **kind)
    assert (geometry.tile_rows, geometry.tiles) == (rows, tiles)
