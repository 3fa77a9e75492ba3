"""What tests share: randomness, fresh at every run and repeated with ``--seed``; compilers, for here and for an H200; races."""

import atexit
import gc
import itertools
import os
import pathlib
import secrets
import shutil
import tempfile

import jax
import numpy as np
import pytest

_MAPS = pathlib.Path("/proc/self/maps")
_tests = itertools.count(1)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="seed of every test's random inputs, to repeat a failure")


def pytest_configure(config):
    config.addinivalue_line("markers", "optimised: compiled as in use, for what optimisation may change")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the workers: their threads would wait for each other's cores
    if config.option.markexpr != "aot" and os.environ.get("JAX_PLATFORMS") == "cpu":
        _share_programs()
        # two workers that compile the same at the same moment: one may read what the other has not finished writing
        config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache")


def _share_programs() -> None:
    """What one worker has compiled the others load, and the processes that tests start; for this run alone."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # a worker, or somebody's own
        return
    folder = tempfile.mkdtemp(prefix="programs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


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
    if next(_tests) % 25 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 50_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def quick_compiles(request):
    """Programs are tiny and many, and compiling them is what takes the time: without optimisation, unless marked otherwise."""
    as_in_use = any(request.node.get_closest_marker(name) for name in ("optimised", "aot"))
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu" and not as_in_use)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def no_races():
    """In interpret mode. The interpreter keeps its state between calls and only notes a race; newer versions raise."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()
    yield
    found = gpu_callbacks.get_races().races_found
    gpu_callbacks.reset_gpu_interpret_mode_state()
    assert not found


@pytest.fixture(scope="module")
def h200_mesh():
    from jax.experimental import topologies

    from tests.aot_runs import H200

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200.read_text(), topology="1x1x1")
    return topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("gpu",))


@pytest.fixture
def compile_for_h200(h200_mesh, monkeypatch, tmp_path):
    """``compile_for_h200(call, state, *arguments)``: compiled with the state donated; ``kernels`` finds what it reports."""
    from jax.experimental.mosaic.gpu import constraints

    # a folder for what is asked for gets this as well, which nobody reads and which takes longer to write than to solve
    monkeypatch.setattr(constraints.ConstraintSystem, "__str__", lambda system: "")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_RESOURCES", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    placed = jax.sharding.NamedSharding(h200_mesh, jax.sharding.PartitionSpec())

    def compile_it(call, *arguments, donate=(0,)):
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)
        with jax.sharding.use_abstract_mesh(h200_mesh.abstract_mesh):
            return jax.jit(call, donate_argnums=donate).lower(*arguments).compile()

    return compile_it
