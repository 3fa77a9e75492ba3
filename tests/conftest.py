"""Randomness of the tests: fresh at every run, printed when a test fails, repeated with ``--seed``."""

import gc
import itertools
import pathlib
import secrets

import jax
import numpy as np
import pytest

_MAPS = pathlib.Path("/proc/self/maps")
_tests = itertools.count(1)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="seed of every test's random inputs, to repeat a failure")


@pytest.fixture
def rng(request) -> np.random.Generator:
    seed = request.config.getoption("--seed")
    seed = secrets.randbits(32) if seed is None else seed
    print(f"repeat with --seed={seed}")  # pytest shows it with a failure
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def few_programs():
    """A process may map 65,530 pieces of memory and crashes at the next one; every compiled program takes a few."""
    yield
    if next(_tests) % 25 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def quick_compiles():
    """For programs that are tiny and many: compiling them is what takes the time."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)
