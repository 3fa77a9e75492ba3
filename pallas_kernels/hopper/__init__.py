"""Kernels for Hopper GPUs (H100, H200) in Pallas Mosaic GPU."""

from pallas_kernels.hopper.flush import flush
from pallas_kernels.hopper.step import step
from pallas_kernels.hopper.stream import StreamConfig
from pallas_kernels.hopper.support import takes_raw_records, unsupported
from pallas_kernels.hopper.tiles import Geometry, Interpret, Pool, Rows, Tokens
from pallas_kernels.hopper.verify import verify

__all__ = [
    "Geometry",
    "Interpret",
    "Pool",
    "Rows",
    "StreamConfig",
    "Tokens",
    "flush",
    "step",
    "takes_raw_records",
    "unsupported",
    "verify",
]
