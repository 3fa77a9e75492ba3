"""Kernels for Hopper GPUs (H100, H200) in Pallas Mosaic GPU."""

from pallas_kernels.hopper.flush import flush
from pallas_kernels.hopper.step import StepConfig, step
from pallas_kernels.hopper.tiles import Geometry, Interpret, Pool, Rows, Tokens, unsupported
from pallas_kernels.hopper.verify import VerifyConfig, verify

__all__ = [
    "Geometry",
    "Interpret",
    "Pool",
    "Rows",
    "StepConfig",
    "Tokens",
    "VerifyConfig",
    "flush",
    "step",
    "unsupported",
    "verify",
]
