"""The models that are measured: byte-level, one per family, every mixer recurrent.

The families' hybrids have attention layers too. They hold no recurrent state, so no policy changes them, and at 128k tokens
they would be most of the run's cost: they are left out, and every layer is one whose state is measured.

Gates start slow, as published training code has them for Gated DeltaNet and Mamba-2: with no input, a log decay of 0.001 to 0.1
times 1 to 16 per token. The delta-rule mixers' own start, which published weights overwrite, forgets within a token or two,
and what a state has forgotten cannot drift.
"""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from replayssm_jax.models import KimiLinear, KimiLinearConfig, NemotronH, NemotronHConfig, Qwen3_5, Qwen3_5Config
from replayssm_jax.models.decoder import Decoder

FAMILIES = ("gdn", "mamba2", "kda")
VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Size:
    """Widths of a model; about 13 million weights at the default, whatever the family."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    head_dim: int = 64


SIZES = {"small": Size(), "toy": Size(layers=1, hidden=32, heads=2, head_dim=16)}


def make_model(family: str, size: Size, dtype: str, seed: int = 0) -> Decoder:
    """A fresh model with float32 weights and activations in ``dtype``.

    Raises:
        ValueError: no family has this name.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    s, rngs = size, nnx.Rngs(seed)
    outer: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": s.hidden, "tie_word_embeddings": True}
    # no layer uses these; a config must name them
    attention: dict[str, Any] = {"num_attention_heads": 1, "head_dim": s.hidden, "num_key_value_heads": 1}
    config: Any
    cls: Any
    match family:
        case "gdn":
            cls, config = (
                Qwen3_5,
                Qwen3_5Config(
                    **outer,
                    **attention,
                    intermediate_size=8 * s.hidden // 3,
                    layer_types=("linear_attention",) * s.layers,
                    linear_num_key_heads=s.heads // 2,
                    linear_num_value_heads=s.heads,
                    linear_key_head_dim=s.head_dim,
                    linear_value_head_dim=s.head_dim,
                ),
            )
        case "mamba2":
            cls, config = (
                NemotronH,
                NemotronHConfig(
                    **outer,
                    **attention,
                    layers_block_type=("linear_attention", "mlp") * s.layers,
                    intermediate_size=4 * s.hidden,
                    mamba_num_heads=2 * s.heads,
                    mamba_head_dim=s.head_dim,
                    ssm_state_size=s.head_dim,
                    n_groups=2,
                ),
            )
        case "kda":
            cls, config = (
                KimiLinear,
                KimiLinearConfig(
                    **outer,
                    intermediate_size=8 * s.hidden // 3,
                    num_hidden_layers=s.layers,
                    attention_layers=(),
                    linear_num_heads=s.heads,
                    linear_head_dim=s.head_dim,
                    linear_conv_kernel_dim=4,
                    num_attention_heads=1,
                    qk_nope_head_dim=s.head_dim,
                    qk_rope_head_dim=s.head_dim,
                    v_head_dim=s.head_dim,
                    kv_lora_rank=s.head_dim,
                ),
            )
    model = cls(config, dtype=dtype, param_dtype="float32", rngs=rngs)
    for mixer in recurrent_mixers(model):
        # biases whose softplus is log-uniform in 0.001 .. 0.1
        low, high = math.log(1e-3), math.log(1e-1)
        start = jnp.exp(jax.random.uniform(rngs.params(), mixer.dt_bias[...].shape, jnp.float32, low, high))
        mixer.dt_bias = nnx.Param(start + jnp.log(-jnp.expm1(-start)))
    return model


def recurrent_mixers(model: Decoder) -> list[Any]:
    """The mixers that have a state, in the order of their layers."""
    return [layer.mixer for layer in model.layers if hasattr(layer.mixer, "A_log")]


def memory(model: Decoder) -> list[list[float]]:
    """Tokens over which a state decays by 1 / e at a gate input of zero: per layer the shortest, median and longest gate."""

    def tokens(mixer: Any) -> np.ndarray:
        gate = jax.nn.softplus(mixer.dt_bias[...]).reshape(mixer.A_log.shape[0], -1)
        return np.asarray(1 / (jnp.exp(mixer.A_log[...])[:, None] * gate))

    return [[round(float(x), 2) for x in np.quantile(tokens(mixer), (0, 0.5, 1))] for mixer in recurrent_mixers(model)]


def save_weights(path: pathlib.Path, family: str, size: Size, weights: Any) -> None:
    """Weights in the order of their pytree, with what they belong to. ``weights`` is an ``nnx.State`` of parameters."""
    leaves = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(weights))}
    save_file(leaves, path, metadata={"family": family, "size": json.dumps(dataclasses.asdict(size))})


def load_model(path: pathlib.Path, dtype: str) -> Decoder:
    """The model that ``save_weights`` wrote, with activations in ``dtype``."""
    with safe_open(path, framework="np") as file:
        about = file.metadata()
    model = make_model(about["family"], Size(**json.loads(about["size"])), dtype)
    leaves = load_file(path)
    tree = jax.tree.structure(nnx.state(model, nnx.Param))
    nnx.update(model, jax.tree.unflatten(tree, [leaves[name] for name in sorted(leaves)]))
    return model


def read_text(path: pathlib.Path, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """A file's bytes, cut in two: what is trained on, and the last ``held_out`` of it. Two vectors of uint8.

    Raises:
        SystemExit: there is no such file.
    """
    try:
        text = np.frombuffer(path.read_bytes(), np.uint8)
    except FileNotFoundError:
        raise SystemExit(f"{path} does not exist: python examples/kjv.py --out={path} writes it") from None
    end = round(len(text) * (1 - held_out))
    return text[:end], text[end:]
