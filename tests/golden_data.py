"""The published goldens (tests/goldens/README.md): mixers built from their tensors, their states put into caches."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from replayssm_jax import ReplayPointer, ReplayPolicy, init_pointer
from replayssm_jax.mixers import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KimiDeltaAttention,
    KimiDeltaAttentionConfig,
    Mamba2,
    Mamba2Config,
    MixerCache,
)

ROOT = pathlib.Path(__file__).parent / "goldens"
FAMILIES = ("qwen3_5", "qwen3_next", "kimi_linear", "glm5_next_kda", "mamba2", "nemotron_h")
STOPS = (16, 32, 48)  # decode steps whose states are published, beside step 0

Tensors = dict[str, np.ndarray]


@functools.cache
def load(family: str, name: str) -> Tensors:
    """The tensors of goldens/<family>/<name>.safetensors."""
    return load_file(ROOT / family / f"{name}.safetensors")


@functools.cache
def read_json(family: str, name: str) -> dict[str, Any]:
    return json.loads((ROOT / family / f"{name}.json").read_text())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerGolden:
    """One published mixer layer and what it does in 48 decode steps.

    Attributes:
        mixer: with the published weights, float32.
        x, y: inputs and outputs of the decode steps. [B, 48, hidden] float32
        recurrent: state after 0, 16, 32 and 48 steps. [B, H, V, K] float32
        conv: the last four raw inputs of the convolution then, newest last. [B, 4, C] float32
        seen: tokens consumed before the first decode step.
    """

    mixer: nnx.Module
    x: np.ndarray
    y: np.ndarray
    recurrent: dict[int, np.ndarray]
    conv: dict[int, np.ndarray]
    seen: int


def layers(family: str) -> tuple[int, ...]:
    """Published indices of a family's mixer layers."""
    return tuple(entry["layer_idx"] for entry in read_json(family, "meta").get("mixer_layers", [{"layer_idx": 0}]))


LAYERS = tuple((family, layer) for family in FAMILIES for layer in layers(family))


@functools.cache
def mixer_golden(family: str, layer: int) -> MixerGolden:
    """The golden of one mixer layer, named by its published index."""
    if family == "glm5_next_kda":
        golden, seen = load(family, "golden"), read_json(family, "meta")["prompt_len"]
        x, y = golden["x"][:, seen:], golden["y_decode"]
    else:
        trace, seen = load(family, "trace"), load(family, "golden")["prompt"].shape[1]
        x, y = trace[f"layer{layer}.mixer_in"], trace[f"layer{layer}.mixer_out"]
    states = load(family, "states")
    return MixerGolden(
        mixer=_build(family, layer),
        x=x,
        y=y,
        recurrent={step: published_recurrent(family, states, step, layer) for step in (0, *STOPS)},
        conv={step: np.swapaxes(states[f"step{step}.layer{layer}.conv_state"], 1, 2) for step in (0, *STOPS)},
        seen=seen,
    )


def published_recurrent(family: str, states: Tensors, step: int, layer: int) -> np.ndarray:
    """A recurrent state in this package's layout, [B, H, V, K]; the delta-rule families publish [B, H, K, V]."""
    state = states[f"step{step}.layer{layer}.recurrent_state"]
    return state if family in ("mamba2", "nemotron_h") else np.swapaxes(state, 2, 3)


def import_state(
    golden: MixerGolden, policy: ReplayPolicy, slots: tuple[int, ...], num_slots: int
) -> tuple[MixerCache, ReplayPointer]:
    """A cache whose slots stand after the prompt; everything that no live row may read is NaN.

    Args:
        golden: whose step-0 states are taken.
        policy: of the cache; float32 everywhere.
        slots: slot of each row of the golden.
        num_slots: N
    """
    rows = np.asarray(slots)
    cache = golden.mixer.init_cache(num_slots, policy)
    conv = np.full(cache.conv.shape, np.nan, np.float32)
    width, ring = golden.mixer.conv1d.width, conv.shape[1]
    for age in range(1, width):  # the token at position seen - age
        conv[rows, (golden.seen - age) % ring] = golden.conv[0][:, -age]
    checkpoint = np.full(cache.checkpoint.shape, np.nan, np.float32)
    checkpoint[rows] = golden.recurrent[0]
    buffer = jax.tree.map(lambda pool: jnp.asarray(np.full(pool.shape, np.nan, pool.dtype)), cache.buffer)
    cache = dataclasses.replace(cache, conv=jnp.asarray(conv), checkpoint=jnp.asarray(checkpoint), buffer=buffer)
    pointer = init_pointer(num_slots, policy.window, policy.max_draft)
    return cache, dataclasses.replace(pointer, origin=pointer.origin.at[rows].set(golden.seen))


def assign(module: nnx.Module, values: dict[str, np.ndarray]) -> None:
    """Sets every parameter of a module by its dotted path; a missing, extra or misshapen one is an error."""
    state = nnx.state(module, nnx.Param)
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    assert variables.keys() == values.keys(), sorted(variables.keys() ^ values.keys())
    for path, variable in variables.items():
        old = variable.get_value()
        assert old.shape == values[path].shape, (path, old.shape, values[path].shape)
        variable.set_value(jnp.asarray(np.asarray(values[path], np.float32).astype(old.dtype)))
    nnx.update(module, state)


def _build(family: str, layer: int) -> nnx.Module:
    prefix, build = {
        "qwen3_5": (f"model.layers.{layer}.linear_attn.", _gated_delta_net),
        "qwen3_next": (f"model.layers.{layer}.linear_attn.", _gated_delta_net),
        "kimi_linear": (f"model.layers.{layer}.self_attn.", _kimi_linear),
        "glm5_next_kda": ("", _glm5_next_kda),
        "mamba2": (f"backbone.layers.{layer}.mixer.", _mamba2),
        "nemotron_h": (f"backbone.layers.{layer}.mixer.", _nemotron_h),
    }[family]
    tensors = {n.removeprefix(prefix): t for n, t in load(family, "model").items() if n.startswith(prefix)}
    make, values = build(tensors, read_json(family, "config"))
    mixer = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    assign(mixer, values)
    return mixer


def _linears(tensors: Tensors, *names: str) -> dict[str, np.ndarray]:
    return {f"{name.split('.')[-1]}.kernel": tensors[f"{name}.weight"].T for name in names}


def _conv(*weights: np.ndarray) -> dict[str, np.ndarray]:
    return {"conv1d.weight": np.concatenate(weights)[:, 0].T}


def _gated_delta_net(tensors: Tensors, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    sizes = GatedDeltaNetConfig(
        hidden_size=config["hidden_size"],
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_head_dim=config["linear_key_head_dim"],
        value_head_dim=config["linear_value_head_dim"],
        norm_eps=config["rms_norm_eps"],
    )
    if "in_proj_qkvz.weight" in tensors:
        tensors = tensors | _deinterleaved(sizes, tensors)
    values = {name: tensors[name] for name in ("A_log", "dt_bias")} | {"norm": tensors["norm.weight"]}
    values |= _conv(tensors["conv1d.weight"])
    values |= _linears(tensors, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    return functools.partial(GatedDeltaNet, sizes), values


def _deinterleaved(sizes: GatedDeltaNetConfig, tensors: Tensors) -> Tensors:
    """Qwen3-Next keeps its rows per key head, [q | k | v | z] and [b | a]; Qwen3.5 and this package keep them apart."""
    heads, key = sizes.num_key_heads, sizes.key_head_dim
    ratio = sizes.num_value_heads // heads
    value = ratio * sizes.value_head_dim

    def split(name: str, *widths: int) -> list[np.ndarray]:
        per_head = tensors[f"{name}.weight"].reshape(heads, sum(widths), sizes.hidden_size)
        parts = np.split(per_head, np.cumsum(widths)[:-1], axis=1)
        return [part.reshape(-1, sizes.hidden_size) for part in parts]

    q, k, v, z = split("in_proj_qkvz", key, key, value, value)
    b, a = split("in_proj_ba", ratio, ratio)
    parts = {"in_proj_qkv": np.concatenate([q, k, v]), "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}
    return {f"{name}.weight": part for name, part in parts.items()}


def _kimi_linear(tensors: Tensors, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    linear = config["linear_attn_config"]
    sizes = KimiDeltaAttentionConfig(
        hidden_size=config["hidden_size"],
        num_heads=linear["num_heads"],
        head_dim=linear["head_dim"],
        norm_eps=config["rms_norm_eps"],
    )
    values = {"A_log": tensors["A_log"].reshape(-1), "dt_bias": tensors["dt_bias"], "o_norm": tensors["o_norm.weight"]}
    values |= _conv(*(tensors[f"{part}_conv1d.weight"] for part in "qkv"))
    values |= _linears(
        tensors, "q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"
    )
    return functools.partial(KimiDeltaAttention, sizes), values


def _glm5_next_kda(tensors: Tensors, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    sizes = KimiDeltaAttentionConfig(
        hidden_size=config["hidden_size"],
        num_heads=config["linear_num_heads"],
        head_dim=config["linear_head_dim"],
        norm_eps=config["rms_norm_eps"],
        gate_lower_bound=config["linear_lower_bound"],
    )
    gate = "forget_gate."
    values = {"A_log": tensors[f"{gate}A_log"], "dt_bias": tensors[f"{gate}dt_bias"], "o_norm": tensors["o_norm.weight"]}
    values |= _conv(tensors["conv1d.weight"])
    values |= _linears(tensors, "q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj")
    values |= _linears(tensors, f"{gate}f_a_proj", f"{gate}f_b_proj")
    return functools.partial(KimiDeltaAttention, sizes), values


def _mamba2(tensors: Tensors, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    return _mamba2_values(tensors, config, config["num_heads"], config["head_dim"], config["state_size"], norm_groups=1)


def _nemotron_h(tensors: Tensors, config: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    heads, head_dim, groups = config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"]
    return _mamba2_values(tensors, config, heads, head_dim, config["ssm_state_size"], norm_groups=groups)


def _mamba2_values(
    tensors: Tensors, config: dict[str, Any], heads: int, head_dim: int, state_size: int, norm_groups: int
) -> tuple[Any, dict[str, np.ndarray]]:
    sizes = Mamba2Config(
        hidden_size=config["hidden_size"],
        num_heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=config["n_groups"],
        norm_groups=norm_groups,
        norm_eps=config["layer_norm_epsilon"],
    )
    values = {name: tensors[name] for name in ("A_log", "D", "dt_bias")} | {"norm": tensors["norm.weight"]}
    values |= _conv(tensors["conv1d.weight"]) | {"conv1d.bias": tensors["conv1d.bias"]}
    return functools.partial(Mamba2, sizes), values | _linears(tensors, "in_proj", "out_proj")
