"""Qwen3.5's multi-token-prediction head: read from a published layout, and what it computes."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from replayssm_jax.decoding import MultiTokenPrediction
from replayssm_jax.models import CheckpointError, from_pretrained
from replayssm_jax.models.qwen3_5_mtp import Qwen3_5MTP, published_sources
from replayssm_jax.models.weights import published_tensors
from replayssm_jax.pointer import init_pointer
from tests.decoding_runs import model
from tests.golden_data import ROOT

FAMILIES = ("qwen3_5", "qwen3_next")


def make_head(family: str) -> Qwen3_5MTP:
    head = Qwen3_5MTP(model(family).config, rngs=nnx.Rngs(3))
    # norms are kept around zero, where their weights would not show
    for _, variable in nnx.to_flat_state(nnx.state(head, nnx.Param)):
        value = variable.get_value()
        if value.ndim == 1:
            variable.set_value(jnp.linspace(-0.3, 0.3, value.size).astype(value.dtype))
    return head


def folder_with(head: Qwen3_5MTP, family: str, path, change=lambda tensors: tensors):
    """The golden's folder with this head's tensors beside the model's."""
    shutil.copytree(ROOT / family, path)
    own = dict(published_tensors(head, published_sources(head.config)))
    save_file(change({**load_file(path / "model.safetensors"), **own}), path / "model.safetensors")
    return path


def test_a_head_is_read_as_it_was_written_and_the_model_beside_it(tmp_path):
    head = make_head("qwen3_5")
    folder = folder_with(head, "qwen3_5", tmp_path / "folder")
    again = Qwen3_5MTP.from_pretrained(folder)
    for mine, other in zip(jax.tree.leaves(nnx.state(head)), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(mine, other)
    beside = from_pretrained(folder)
    MultiTokenPrediction(again).check(beside)
    with pytest.raises(ValueError, match="belongs to another model"):
        MultiTokenPrediction(again).check(model("qwen3_next"))


def test_every_tensor_of_a_mixture_head_has_its_place():
    """Experts of their own and stacked ones, as publishers have them."""
    config = model("qwen3_next").config
    sources = published_sources(config, None)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(make_head("qwen3_next"), nnx.Param))}
    assert names == sources.keys()
    assert sources["fc.kernel"].names == ("mtp.fc.weight",)
    assert sources["block.mlp.experts.down_proj"].names == ("mtp.layers.0.mlp.experts.down_proj",)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if not k.startswith("mtp.")}, {}, "no multi-token-prediction head"),
        (lambda t: {k: v for k, v in t.items() if k != "mtp.fc.weight"}, {}, r"lacks tensors: mtp\.fc\.weight"),
        (lambda t: t | {"mtp.layers.1.x": t["mtp.fc.weight"].copy()}, {}, r"unknown tensors: mtp\.layers\.1\.x"),
        (lambda t: t, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2 is not supported"),
        (lambda t: t, {"model_type": "mamba2"}, "model_type='mamba2' has no multi-token-prediction head"),
    ],
)
def test_folders_that_do_not_fit_are_named(tmp_path, change, config, message):
    folder = folder_with(make_head("qwen3_5"), "qwen3_5", tmp_path / "folder", change)
    published = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(published | config))
    with pytest.raises(CheckpointError, match=message):
        Qwen3_5MTP.from_pretrained(folder)


def test_the_first_pair_is_computed_as_published():
    """In NumPy: one token attends to itself alone, so its attention is its value, gated."""
    head, subject = make_head("qwen3_5"), model("qwen3_5")
    config = head.config
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((1, 1, config.hidden_size)).astype(np.float32)
    cache, pointer = head.init_cache(1, 4), init_pointer(1, window=2, max_draft=1)
    _, got = head(subject, cache, jnp.asarray(hidden), jnp.array([[5]]), pointer, None, jnp.array([1]))

    w = {name: np.asarray(x, np.float64) for name, x in published_tensors(head, published_sources(config))}

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + config.rms_norm_eps) * (1 + w[f"mtp.{name}.weight"])

    def silu(x):
        return x / (1 + np.exp(-x))

    embedding = np.asarray(subject.embed_tokens.get_value(), np.float64)[5]
    both = [norm(embedding, "pre_fc_norm_embedding"), norm(hidden[0, 0].astype(np.float64), "pre_fc_norm_hidden")]
    x = w["mtp.fc.weight"] @ np.concatenate(both)
    layer = "mtp.layers.0"
    inputs = norm(x, "layers.0.input_layernorm")
    gate = (w[f"{layer}.self_attn.q_proj.weight"] @ inputs).reshape(config.num_attention_heads, 2, config.head_dim)[:, 1]
    value = (w[f"{layer}.self_attn.v_proj.weight"] @ inputs).reshape(config.num_key_value_heads, config.head_dim)
    value = np.repeat(value, config.num_attention_heads // config.num_key_value_heads, axis=0)
    x = x + w[f"{layer}.self_attn.o_proj.weight"] @ (value / (1 + np.exp(-gate))).reshape(-1)
    inputs = norm(x, "layers.0.post_attention_layernorm")
    up = w[f"{layer}.mlp.up_proj.weight"] @ inputs
    x = x + w[f"{layer}.mlp.down_proj.weight"] @ (silu(w[f"{layer}.mlp.gate_proj.weight"] @ inputs) * up)
    np.testing.assert_allclose(got[0, 0], norm(x, "norm"), rtol=1e-4, atol=1e-5)
