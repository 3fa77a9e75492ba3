"""What the kernels can serve, said before a compiler has to."""

from pallas_kernels.hopper import launch
from pallas_kernels.hopper.cut import best_read_config
from pallas_kernels.hopper.cut import scratch_of as read_scratch
from pallas_kernels.hopper.refresh import refresh_unsupported
from pallas_kernels.hopper.shared import kilobytes
from pallas_kernels.hopper.step import scratch as step_scratch
from pallas_kernels.hopper.tiles import TILE_ROWS, Geometry
from pallas_kernels.hopper.verify import scratch as verify_scratch

_SHARED_KB = 227  # of a Hopper multiprocessor, for one block
_READ_KEY_DIMS, _READ_VALUE_DIM = (64, 128, 256), 256  # what refresh and read take, the second in multiples of TILE_ROWS


def unsupported(geometry: Geometry) -> str | None:
    """Why the kernels cannot serve a call, with what would work; None if they can."""
    g = geometry
    if g.window not in (16, 32):
        return f"window={g.window}: the GPU kernels take window=16 or window=32"
    if g.key_dim % 32 or g.key_dim > 256:
        return f"key_dim={g.key_dim}: the GPU kernels take multiples of 32 up to 256"
    if g.value_dim % 8:
        return f"value_dim={g.value_dim}: the GPU kernels take multiples of 8"
    if g.folds_apart and (reason := _unsupported_read(g)):
        return reason
    if g.tokens > 16:
        return f"T={g.tokens} drafts: the GPU kernels take up to 16"
    if (needed := shared_kb(g)) > _SHARED_KB:
        fix = "fewer drafts, window=16 or bfloat16 records"
        return (
            f"T={g.tokens} tokens with key_dim={g.key_dim} need {needed} KB of shared memory of {_SHARED_KB}: {fix} take less"
        )
    return refresh_unsupported(g) if g.folds_apart else None


def takes_raw_records(key_dim: int, value_dim: int) -> bool:
    """Whether heads of these dims can have raw records (or a copy, or rounding by chance); updates have kernels for more."""
    return key_dim in _READ_KEY_DIMS and value_dim % TILE_ROWS == 0 and value_dim <= _READ_VALUE_DIM


def _unsupported_read(g: Geometry) -> str | None:
    if takes_raw_records(g.key_dim, g.value_dim):
        return None
    what = "rounding='stochastic'" if g.rounding != "nearest" else "records='raw'"
    what = what if g.readout == "checkpoint" else f"readout={g.readout!r}"
    if g.key_dim not in _READ_KEY_DIMS:
        return f"key_dim={g.key_dim} with {what}: the GPU kernels take 64, 128 or 256"
    return f"value_dim={g.value_dim} with {what}: the GPU kernels take multiples of {TILE_ROWS} up to {_READ_VALUE_DIM}"


def shared_kb(geometry: Geometry) -> int:
    """Shared memory of a step, verify or read in KB."""
    g = geometry
    config = launch.best_config(g)
    if g.folds_apart:
        every = read_scratch(g, best_read_config(g))
    else:
        own = step_scratch(g) if g.tokens == 1 else verify_scratch(g, config)
        every = launch.common_scratch(g, config) | own
    return kilobytes(every, reductions=g.folds_apart)
