"""ReplaySSM decoding for state-space layers in JAX."""

from replayssm_jax.pointer import (
    ReplayPointer,
    after_prefill,
    after_verify,
    commit,
    init_pointer,
    reset_pointer,
)
from replayssm_jax.policy import ReplayPolicy
from replayssm_jax.prefill import prefill
from replayssm_jax.readout import Readout
from replayssm_jax.replay import flush, materialize, step, verify
from replayssm_jax.state import (
    Recurrence,
    ReplayBuffer,
    ReplayState,
    Tokens,
    copy_slots,
    init_state,
    reset,
)

__version__ = "0.1.0"

__all__ = [
    "Readout",
    "Recurrence",
    "ReplayBuffer",
    "ReplayPointer",
    "ReplayPolicy",
    "ReplayState",
    "Tokens",
    "after_prefill",
    "after_verify",
    "commit",
    "copy_slots",
    "flush",
    "init_pointer",
    "init_state",
    "materialize",
    "prefill",
    "reset",
    "reset_pointer",
    "step",
    "verify",
]
