"""The mixers in float64 NumPy, token by token and sharing nothing with the package; and small random mixers to hold to it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from replayssm_jax import Recurrence
from replayssm_jax.mixers import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KimiDeltaAttention,
    KimiDeltaAttentionConfig,
    Mamba2,
    Mamba2Config,
)
from tests.golden_data import assign

HIDDEN = 24
NORM_EPS = 0.01  # bounds what the output norm makes of a q . k that happens to be near zero
Array = np.ndarray
Weights = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a mixer does with one sequence.

    Attributes:
        y: [T, hidden]
        states: after each token. [T, H, V, K]
        inputs: of the convolution. [T, C]
    """

    y: Array
    states: Array
    inputs: Array

    def history(self, count: int, before: int = 3) -> Array:
        """The convolution's last ``before`` inputs after ``count`` tokens, zeros before the first. [before, C]"""
        padded = np.concatenate([np.zeros((before, self.inputs.shape[1])), self.inputs[:count]])
        return padded[len(padded) - before :]


def law(
    recurrence: Recurrence, q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """Outputs and states of the recurrence from a state [H, V, K], zero if None.

    q, k [T, G, K], v [T, H, V], log_decay [T, H] or [T, H, K], beta [T, H].
    """
    r, outs, states = recurrence, [], []
    state = np.zeros(r.state_dims) if state is None else state
    group = r.num_value_heads // r.num_key_heads
    for t in range(len(v)):
        keys, queries = np.repeat(k[t], group, 0), np.repeat(q[t], group, 0)
        alpha = np.exp(log_decay[t])
        state = state * (alpha[:, None, None] if r.gate == "head" else alpha[:, None, :])
        known = np.einsum("hvk,hk->hv", state, keys) if r.delta_rule else 0.0
        state = state + (beta[t][:, None] * (v[t] - known))[..., None] * keys[:, None]
        outs.append(np.einsum("hvk,hk->hv", state, queries))
        states.append(state)
    return np.stack(outs), np.stack(states)


def oracle(mixer: Any, x: Any, state: Any = None, history: Any = None) -> Trace:
    """One sequence x [T, hidden] in float64 with the mixer's own weights, from a state and convolution inputs or from nothing.

    state [H, V, K], history [at least width - 1, C].
    """
    w = {".".join(map(str, path)): np.asarray(v.get_value(), np.float64) for path, v in nnx.to_flat_state(nnx.state(mixer))}
    run = {GatedDeltaNet: _gated_delta_net, KimiDeltaAttention: _kimi_delta, Mamba2: _mamba2}[type(mixer)]
    state, history = (None if past is None else np.asarray(past, np.float64) for past in (state, history))
    return run(mixer.config, w, np.asarray(x, np.float64), state, history)


def _gated_delta_net(c: GatedDeltaNetConfig, w: Weights, x: Array, state: Any, history: Any) -> Trace:
    inputs = x @ w["in_proj_qkv.kernel"]
    q, k, v = np.split(_conv(w, inputs, history), [c.key_width, 2 * c.key_width], axis=-1)
    q, k, v = _heads(q, c.num_key_heads), _heads(k, c.num_key_heads), _heads(v, c.num_value_heads)
    beta = sigmoid(x @ w["in_proj_b.kernel"]) * (2 if c.allow_negative_eigenvalues else 1)
    decay = -np.exp(w["A_log"]) * softplus(x @ w["in_proj_a.kernel"] + w["dt_bias"])
    out, states = law(c.recurrence, _unit(q) * c.key_head_dim**-0.5, _unit(k), v, decay, beta, state)
    z = _heads(x @ w["in_proj_z.kernel"], c.num_value_heads)
    return Trace(_flat(_rms(out, c.norm_eps) * w["norm"] * z * sigmoid(z)) @ w["out_proj.kernel"], states, inputs)


def _kimi_delta(c: KimiDeltaAttentionConfig, w: Weights, x: Array, state: Any, history: Any) -> Trace:
    inputs = np.concatenate([x @ w[f"{part}_proj.kernel"] for part in "qkv"], -1)
    q, k, v = (_heads(part, c.num_heads) for part in np.split(_conv(w, inputs, history), 3, axis=-1))
    f = _heads(x @ w["f_a_proj.kernel"] @ w["f_b_proj.kernel"] + w["dt_bias"], c.num_heads)
    scale = np.exp(w["A_log"])[:, None]
    decay = -scale * softplus(f) if c.gate_lower_bound is None else c.gate_lower_bound * sigmoid(scale * f)
    beta = sigmoid(x @ w["b_proj.kernel"])
    out, states = law(c.recurrence, _unit(q) * c.head_dim**-0.5, _unit(k), v, decay, beta, state)
    gate = _heads(x @ w["g_a_proj.kernel"] @ w["g_b_proj.kernel"], c.num_heads)
    return Trace(_flat(_rms(out, c.norm_eps) * w["o_norm"] * sigmoid(gate)) @ w["o_proj.kernel"], states, inputs)


def _mamba2(c: Mamba2Config, w: Weights, x: Array, state: Any, history: Any) -> Trace:
    projected = x @ w["in_proj.kernel"] + w.get("in_proj.bias", 0)
    z, inputs, dt = np.split(projected, [c.inner_width, c.inner_width + c.conv_channels], axis=-1)
    v, k, q = np.split(_conv(w, inputs, history), [c.inner_width, c.inner_width + c.group_width], axis=-1)
    q, k, v = _heads(q, c.num_groups), _heads(k, c.num_groups), _heads(v, c.num_heads)
    dt = np.clip(softplus(dt + w["dt_bias"]), *c.time_step_limit)
    out, states = law(c.recurrence, q, k, v, -np.exp(w["A_log"]) * dt, dt, state)
    gated = _flat(out + w["D"][:, None] * v) * z * sigmoid(z)
    normed = _flat(_rms(_heads(gated, c.norm_groups), c.norm_eps)) * w["norm"]
    return Trace(normed @ w["out_proj.kernel"] + w.get("out_proj.bias", 0), states, inputs)


def _conv(w: Weights, x: Array, history: Array | None) -> Array:
    weight = w["conv1d.weight"]  # [width, C]
    before = len(weight) - 1
    history = np.zeros((before, x.shape[1])) if history is None else history[len(history) - before :]
    padded = np.concatenate([history, x])
    out = sum(padded[i : i + len(x)] * weight[i] for i in range(len(weight))) + w.get("conv1d.bias", 0)
    return out * sigmoid(out)


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def _unit(x: Array) -> Array:
    return x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)


def _rms(x: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:-2], -1)


def randomised(module: Any, config: Any, dtype: Any, param_dtype: Any) -> Any:
    """A mixer none of whose weights has a special value: norms, biases and D as well as projections are drawn."""
    mixer = nnx.eval_shape(lambda: module(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape)
        if path == "A_log":
            return 0.5 * noise
        if path == "dt_bias":
            return noise - 1
        if path.startswith(("norm", "o_norm", "D")):
            return 1 + 0.3 * noise
        return noise * (0.3 if path.endswith("bias") else 0.5 if path.startswith("conv") else shape[0] ** -0.5)

    flat = nnx.to_flat_state(nnx.state(mixer, nnx.Param))
    shapes = {".".join(map(str, path)): variable.get_value().shape for path, variable in flat}
    assign(mixer, {path: draw(path, shape) for path, shape in shapes.items()})
    return mixer


def gated_delta_net(dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, **config: Any) -> GatedDeltaNet:
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 12, "norm_eps": NORM_EPS} | config
    return randomised(GatedDeltaNet, GatedDeltaNetConfig(hidden_size=HIDDEN, **sizes), dtype, param_dtype)


def kimi_delta(dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, **config: Any) -> KimiDeltaAttention:
    sizes = {"num_heads": 3, "head_dim": 8, "norm_eps": NORM_EPS} | config
    return randomised(KimiDeltaAttention, KimiDeltaAttentionConfig(hidden_size=HIDDEN, **sizes), dtype, param_dtype)


def kimi_delta_bounded(dtype: Any = jnp.float32, param_dtype: Any = jnp.float32) -> KimiDeltaAttention:
    return kimi_delta(dtype, param_dtype, gate_lower_bound=-5.0)


def mamba2(dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, **config: Any) -> Mamba2:
    sizes = {"num_heads": 4, "head_dim": 6, "state_size": 8, "num_groups": 2, "norm_groups": 2} | config
    return randomised(Mamba2, Mamba2Config(hidden_size=HIDDEN, **sizes), dtype, param_dtype)


MIXERS: dict[str, Callable[..., Any]] = {"gated_delta_net": gated_delta_net, "kimi_delta": kimi_delta, "mamba2": mamba2}
GATES = MIXERS | {"kimi_delta_bounded": kimi_delta_bounded}
