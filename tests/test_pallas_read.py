"""Read-out copies and raw records on the GPU backend, in interpret mode, which runs on a CPU and finds races: tiny shapes."""

import dataclasses
import importlib

import numpy as np
import pytest

from pallas_kernels.hopper import heads
from tests.cases import Case
from tests.compare import same_bits
from tests.kernel_runs import INTERPRET
from tests.read_runs import assert_read_flush_is_right, assert_read_is_right
from tests.refresh_runs import make_state

pytestmark = pytest.mark.usefixtures("quick_compiles")


def _case(id, heads, delta_rule, gate, readout, tokens=1, dims=(64, 64), **rest):
    return Case(id=id, heads=heads, dims=dims, delta_rule=delta_rule, gate=gate, readout=readout, max_draft=tokens, **rest)


# together: both gates, both delta rules, every format, all dtypes, both windows, one token and several, heads that share a
# warpgroup, heads of several tiles
CASES = (
    _case("gdn-nvfp4", (2, 1), True, "head", "nvfp4", factors=True, activations="bfloat16"),
    _case("mamba2-fp8", (2, 1), False, "head", "fp8_e4m3", dims=(64, 128), activations="bfloat16", beta_max=3.0),
    _case("kda-bf16", (1, 1), True, "channel", "bf16", dims=(128, 64), activations="float16", checkpoint="float16"),
    _case("gdn-5-bf16", (1, 1), True, "head", "bf16", 5, activations="float16"),
    _case("kda-3-nvfp4", (1, 1), True, "channel", "nvfp4", 3, checkpoint="bfloat16"),
    _case("gla-2-fp8", (1, 1), False, "channel", "fp8_e4m3", 2, factors=True, window=32),
    _case("gdn-plane", (1, 1), True, "head", "bf16_plane", factors=True, activations="bfloat16"),
    _case("gdn-raw", (1, 1), True, "head", "checkpoint", records="raw"),
    _case("mamba2-8-heads", (8, 1), False, "head", "nvfp4", dims=(64, 128), activations="bfloat16", factors=True),
    _case("kda-2-key-heads", (2, 2), True, "channel", "nvfp4", activations="bfloat16", factors=True),
    _case("gdn-2-heads-3-raw", (2, 1), True, "head", "checkpoint", 3, records="raw", activations="bfloat16", factors=True),
    _case("kda-2-raw", (1, 1), True, "channel", "checkpoint", 2, records="raw", activations="bfloat16", factors=True),
    _case("mamba2-chance", (1, 1), False, "head", "checkpoint", checkpoint="bfloat16", rounding="stochastic"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_verify(case, rng, no_races, monkeypatch):
    # as if there were few, so that the value heads of a key head share a warpgroup
    monkeypatch.setattr(importlib.import_module("pallas_kernels.hopper.cut"), "_MULTIPROCESSORS", 1)
    assert_read_is_right(case, rng, case.max_draft, 2e-5, INTERPRET)


@pytest.mark.parametrize("case", [case for case in CASES if case.id == "kda-2-raw"], ids=lambda case: case.id)
def test_a_block_that_folds_and_answers_several_heads(case, rng, no_races, monkeypatch):
    """One after the other, with all that takes the place of something else: readers of keys, values of queries."""
    monkeypatch.setattr(importlib.import_module("pallas_kernels.hopper.refresh"), "_MULTIPROCESSORS", 1)
    monkeypatch.setattr(heads, "side_by_side", lambda g, answers: 1)
    monkeypatch.setattr(heads, "shares_keys", lambda g, answers: True)
    assert_read_is_right(dataclasses.replace(case, dims=(128, 64)), rng, case.max_draft, 2e-5, INTERPRET)


# the refresh kernel's own tests compare more formats
@pytest.mark.parametrize("case", [pytest.param(CASES[0], marks=pytest.mark.long), CASES[1]], ids=lambda case: case.id)
def test_flushed_checkpoints_do_not_depend_on_the_copy(case, rng, no_races):
    seed, pools = int(rng.integers(2**31)), []
    for form in ("checkpoint", "bf16", case.readout):
        case = dataclasses.replace(case, heads=(1, 1), readout=form, records="raw")
        state = make_state(case, np.random.default_rng(seed), [15, 3, 0])
        pools.append(assert_read_flush_is_right(state, np.array([True, False, True]), 2e-6, INTERPRET).checkpoint)
    assert all(same_bits(pools[0], pool) for pool in pools[1:])
