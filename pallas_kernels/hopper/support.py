"""What the kernels can serve, said before a compiler has to."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import launch
from pallas_kernels.hopper.step import scratch as step_scratch
from pallas_kernels.hopper.tiles import Geometry
from pallas_kernels.hopper.verify import scratch as verify_scratch

_SHARED_KB = 227  # of a Hopper multiprocessor, for one block


def unsupported(geometry: Geometry) -> str | None:
    """Why the kernels cannot serve a call, with what would work; None if they can."""
    g = geometry
    if g.window not in (16, 32):
        return f"window={g.window}: the GPU kernels take window=16 or window=32"
    if g.key_dim % 32 or g.key_dim > 256:
        return f"key_dim={g.key_dim}: the GPU kernels take multiples of 32 up to 256"
    if g.value_dim % 8:
        return f"value_dim={g.value_dim}: the GPU kernels take multiples of 8"
    if g.tokens > 16:
        return f"T={g.tokens} drafts: the GPU kernels take up to 16"
    if (needed := shared_kb(g)) > _SHARED_KB:
        fix = "fewer drafts, window=16 or bfloat16 records"
        return (
            f"T={g.tokens} tokens with key_dim={g.key_dim} need {needed} KB of shared memory of {_SHARED_KB}: {fix} take less"
        )
    return None


def shared_kb(geometry: Geometry) -> int:
    """Shared memory of a step or verify in KB: every buffer is padded to one, and one more holds barriers and the like."""
    g = geometry
    config = launch.best_config(g)
    own = step_scratch(g) if g.tokens == 1 else verify_scratch(g, config)
    every = launch.common_scratch(g, config) | own
    buffers: list[Any] = [x for x in jax.tree.leaves(every, is_leaf=_is_buffer) if _is_buffer(x)]
    return 1 + sum(-(-math.prod(x.shape) * jnp.dtype(x.dtype).itemsize // 1024) for x in buffers)


def _is_buffer(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
