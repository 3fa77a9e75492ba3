r"""One small run of a kernel for compute-sanitizer; only the program with the kernel runs on the GPU, the law on the CPU.

    compute-sanitizer --tool memcheck --kernel-name kernel_substring=replay python -m tests.gpu.sanitize gdn-verify
    compute-sanitizer --tool racecheck --racecheck-report all --kernel-name kernel_substring=replay \
        python -m tests.gpu.sanitize gdn-verify

Names are FAMILY-WHAT, or FAMILY-POLICY-WHAT for raw records and copies: gdn, kda, mamba2 or gla; raw, nvfp4, fp8 or plane;
step, verify or flush. Prints the largest error of outputs and checkpoints, and exits with 1 if it is too large.
"""

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")

import jax
import numpy as np
from jax.experimental.mosaic.gpu import utils

from replayssm_jax import ReplayState, replay_pallas, replay_xla
from tests.cases import Case
from tests.compare import relative_error
from tests.kernel_runs import make_call
from tests.lockstep import whole_checkpoint
from tests.read_runs import make_read_call

FAMILIES = {
    "gdn": {"heads": (2, 1), "delta_rule": True, "gate": "head"},
    "kda": {"heads": (1, 1), "delta_rule": True, "gate": "channel"},
    "mamba2": {"heads": (2, 1), "delta_rule": False, "gate": "head"},
    "gla": {"heads": (1, 1), "delta_rule": False, "gate": "channel"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "raw": {"records": "raw"},
    "nvfp4": {"readout": "nvfp4"},
    "fp8": {"readout": "fp8_e4m3"},
    "plane": {"readout": "bf16_plane"},
}
TOKENS = {"step": 1, "verify": 3, "flush": 1}
ALLOWED = 1e-2  # bfloat16 outputs, and a code that a last bit turned


def run(family: str, policy: str | None, what: str) -> float:
    """The largest relative error of outputs and checkpoints; infinite where one is not finite."""
    tokens = TOKENS[what]
    changes: dict[str, Any] = {**FAMILIES[family], **(POLICIES[policy] if policy else {"records": "update"})}
    case = Case(id=family, dims=(64, 128), max_draft=tokens, activations="bfloat16", factors=policy is not None, **changes)
    make = make_read_call if policy else make_call
    gpu, cpu = jax.devices()[0], jax.devices("cpu")[0]
    with jax.default_device(cpu):
        state, drafts, slots, lengths = make(case, np.random.default_rng(0), tokens)
        call = (state, slots, lengths > 0) if what == "flush" else (state, drafts, slots, lengths)
        backends = [getattr(backend, "flush" if what == "flush" else "verify") for backend in (replay_pallas, replay_xla)]
        got, want = (jax.device_get(jax.jit(f)(*jax.device_put(call, on))) for f, on in zip(backends, (gpu, cpu), strict=True))
        pairs = [tuple(whole_checkpoint(x if isinstance(x, ReplayState) else x[0]) for x in (got, want))]
        if what != "flush":
            pairs.append((got[1], want[1]))
        return max(float(np.nan_to_num(relative_error(*pair), nan=np.inf)) for pair in pairs)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="family and what to run")
    parser.add_argument("--without_barriers", action="store_true", help="a control, in which racecheck finds hazards")
    options = parser.parse_args(arguments)
    if options.without_barriers:
        utils.warpgroup_barrier = lambda: None
    name = options.name
    family, *policy, what = name.split("-")
    if family not in FAMILIES or what not in TOKENS or len(policy) > 1 or not set(policy) <= set(POLICIES):
        parser.error(f"{name!r} is no name of a run")
    error = run(family, policy[0] if policy else None, what)
    print(f"{name}: error {error:.1e}, allowed {ALLOWED:.0e}", flush=True)
    return int(not error <= ALLOWED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
