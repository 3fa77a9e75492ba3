"""Copies to shared memory, started together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental import pallas as pl

from pallas_kernels.hopper.tiles import Array, Interpret, Ref


class Copy(NamedTuple):
    """A copy, and the barrier at which it arrives: at once if it is not needed."""

    source: Ref
    target: Ref
    arrived: Ref
    needed: Any = None  # bool, None for True


def request(copies: Sequence[Copy], interpret: Interpret, by_one_warp: bool = True) -> None:
    """Starts copies, from the first warp if there are several and not told otherwise.

    One thread starts a copy in any case, but its addresses are found by every warp that comes by. Where instructions are what
    a kernel waits for, three warps had better not: reads of NVFP4 codes take a tenth less time, verifies of nine drafts two
    percent; folds under a channel gate save registers. Steps wait for memory and take a percent more; folds under a head gate
    gain nothing, and it costs them registers.
    """

    def start() -> None:
        for copy in copies:
            needed = copy.needed if interpret is None else None  # interpret mode knows no predicates and always copies
            plgpu.copy_gmem_to_smem(copy.source, copy.target, copy.arrived, predicate=needed)

    if interpret is not None or not by_one_warp or len(copies) == 1:
        start()
        return

    @plgpu.warp_map
    def _(warp: Array) -> None:
        pl.when(warp == 0)(start)
