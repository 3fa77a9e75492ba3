"""Golden folders of a single mixer: inputs and outputs instead of tokens and logits."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from replayssm_jax.mixers import KimiDeltaAttention, KimiDeltaAttentionConfig
from replayssm_jax.models import weights
from replayssm_jax.models.config import check_model_type
from replayssm_jax.models.weights import Checkpoint, Source, read_config
from replayssm_jax.pointer import after_prefill, after_verify, commit, init_pointer
from replayssm_jax.replay import materialize

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj")


def load_mixer(folder: pathlib.Path) -> KimiDeltaAttention:
    """The bounded-gate mixer of GLM-5.3-Flash under its module's own names.

    Raises:
        CheckpointError: the folder holds another mixer, or its tensors do not fit.
    """
    config = read_config(folder)
    check_model_type(config, ("glm5_next_text",))
    sizes = KimiDeltaAttentionConfig(
        hidden_size=config["hidden_size"],
        num_heads=config["linear_num_heads"],
        head_dim=config["linear_head_dim"],
        conv_width=config["linear_conv_kernel_dim"],
        norm_eps=config["rms_norm_eps"],
        gate_lower_bound=config["linear_lower_bound"],
    )
    sources = {f"{name}.kernel": Source.of(f"{name}.weight", layout=weights.linear) for name in _PROJECTIONS}
    for name in ("f_a_proj", "f_b_proj"):
        sources[f"{name}.kernel"] = Source.of(f"forget_gate.{name}.weight", layout=weights.linear)
    sources["A_log"] = Source.of("forget_gate.A_log", layout=weights.flat)
    sources["dt_bias"] = Source.of("forget_gate.dt_bias")
    sources["conv1d.weight"] = Source.of("conv1d.weight", layout=weights.depthwise)
    sources["o_norm"] = Source.of("o_norm.weight")
    mixer = nnx.eval_shape(lambda: KimiDeltaAttention(sizes, rngs=nnx.Rngs(0)))
    weights.load_into(mixer, sources, Checkpoint(folder))
    return mixer


def check_mixer(folder: pathlib.Path, tolerance: float, implementation: str | None) -> Iterator[tuple[str, bool]]:
    """Prefill, then one-token steps: a line with the largest errors relative to max(1, largest), and whether it passed."""
    mixer = load_mixer(folder)
    golden, states = load_file(folder / "golden.safetensors"), load_file(folder / "states.safetensors")
    x, prompt = golden["x"], golden["y_prefill"].shape[1]
    graph, params = nnx.split(mixer)

    def run(params: Any, cache: Any, x: jax.Array, pointer: Any, prefill: bool) -> Any:
        return nnx.merge(graph, params)(cache, x, pointer, prefill=prefill, implementation=implementation)

    compiled = jax.jit(run, static_argnums=4, donate_argnums=1)
    cache, pointer = mixer.init_cache(len(x)), init_pointer(len(x), 16, 1)
    cache, y = compiled(params, cache, jnp.asarray(x[:, :prompt]), pointer, True)
    pointer = after_prefill(pointer, None, jnp.full(len(x), prompt))
    outputs, state_error = [np.asarray(y)], 0.0
    for step in range(x.shape[1] - prompt + 1):
        if (recorded := states.get(f"step{step}.layer0.recurrent_state")) is not None:
            state = np.asarray(materialize(cache.state(pointer))).swapaxes(-1, -2)
            error = np.abs(state - recorded).max() / max(1.0, np.abs(recorded).max())
            state_error = float(np.maximum(state_error, error))  # NaN stays NaN
        if prompt + step < x.shape[1]:
            cache, y = compiled(params, cache, jnp.asarray(x[:, prompt + step : prompt + step + 1]), pointer, False)
            pointer = commit(after_verify(pointer), 1)
            outputs.append(np.asarray(y))
    recorded = np.concatenate([golden["y_prefill"], golden["y_decode"]], axis=1)
    error = float(np.abs(np.concatenate(outputs, axis=1) - recorded).max() / max(1.0, np.abs(recorded).max()))
    line = f"mixer    outputs {error:.1e}  states {state_error:.1e}"
    yield line, error <= tolerance and state_error <= tolerance
