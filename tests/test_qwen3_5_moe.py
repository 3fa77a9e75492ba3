"""Qwen3.5 mixtures: the recorded Qwen3-Next model, which computes the same, laid out as Qwen3.5 checkpoints are."""

import functools
import json
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from replayssm_jax.models import CheckpointError, Qwen3_5Moe, Qwen3Next, from_pretrained
from replayssm_jax.models.check import check_folder
from replayssm_jax.models.parameter import PublishedParameter
from replayssm_jax.models.weights import Checkpoint
from tests.golden_data import ROOT, load, read_json

PREFIX = {"text": "model.", "multimodal": "model.language_model."}


@functools.cache
def original() -> Qwen3Next:
    return Qwen3Next.from_pretrained(ROOT / "qwen3_next")


def tensors(stacked: bool) -> dict[str, np.ndarray]:
    """The recorded model's tensors under Qwen3.5's names: projections apart, experts stacked or apart."""
    published = load("qwen3_next", "model")
    out = {name: x for name, x in published.items() if "in_proj" not in name and not (stacked and ".experts." in name)}
    for i, layer in enumerate(original().layers):
        there = f"model.layers.{i}"
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
            if hasattr(layer.mixer, name):
                out[f"{there}.linear_attn.{name}.weight"] = np.asarray(getattr(layer.mixer, name).kernel[...]).T
        if stacked:
            parts = {
                name: np.stack([published[f"{there}.mlp.experts.{e}.{name}.weight"] for e in range(4)])
                for name in ("gate_proj", "up_proj", "down_proj")
            }
            out[f"{there}.mlp.experts.gate_up_proj"] = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
            out[f"{there}.mlp.experts.down_proj"] = parts["down_proj"]
    return out


def write(folder, stacked: bool, kind: str, **changes: np.ndarray | None):
    text = read_json("qwen3_next", "config") | {"model_type": "qwen3_5_moe_text"}
    config = text if kind == "text" else {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {name.replace("model.", PREFIX[kind], 1): x for name, x in (tensors(stacked) | changes).items() if x is not None}
    extra = {} if kind == "text" else {"model.visual.proj.weight": np.zeros((2, 2), np.float32)}
    save_file({name: np.ascontiguousarray(x) for name, x in (named | extra).items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", PREFIX)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
def test_every_layout_loads_the_recorded_weights(tmp_path, stacked, kind):
    subject = from_pretrained(write(tmp_path, stacked, kind))
    assert type(subject) is Qwen3_5Moe
    left, right = (dict(nnx.to_flat_state(nnx.state(model, nnx.Param))) for model in (subject, original()))
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        np.testing.assert_array_equal(leaf.get_value(), right[path].get_value(), err_msg=str(path))


@pytest.mark.optimised
def test_recorded_tokens_logits_and_states_are_reproduced(tmp_path):
    folder = write(tmp_path, True, "text")
    for name in ("golden", "states"):
        shutil.copy(ROOT / "qwen3_next" / f"{name}.safetensors", folder)
    line, passed = next(check_folder(folder, "float32", None))  # steps alone: drafts and prompts are Qwen3-Next's own test
    assert passed, line


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.layers.1.mlp.experts.gate_up_proj": None}, r"lacks tensors: model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        ({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((4, 63, 64), np.float32)}, r"gate_up_proj .* gives shape"),
        (
            {"model.layers.1.mlp.experts.down_proj": np.zeros((64, 32), np.float32)},
            r"down_proj .* unexpected shape: \(64, 32\)",
        ),
        ({"model.layers.1.mlp.experts.down_proj": np.zeros((4, 64, 32), np.int8)}, r"down_proj .* int8"),
    ],
    ids=["missing", "size", "rank", "dtype"],
)
def test_stacked_experts_that_do_not_fit_are_named(tmp_path, changed, message):
    with pytest.raises(CheckpointError, match=message):
        Qwen3_5Moe.from_pretrained(write(tmp_path, True, "text", **changed))


def test_an_expert_is_read_without_the_others(tmp_path):
    """As a device of a mesh reads it: rows of its experts and no more."""
    checkpoint, path = Checkpoint(write(tmp_path, True, "text")), "layers.0.mlp.experts.up_proj"
    source = Qwen3_5Moe.published_sources(original().config)[path]
    parameter, read = PublishedParameter(source, list(source.names), checkpoint), []
    checkpoint.read_slice = lambda *a: read.append(Checkpoint.read_slice(checkpoint, *a)) or read[-1]  # type: ignore[method-assign]
    part = parameter.part((slice(1, 3), slice(8, 40), slice(None)))
    np.testing.assert_array_equal(part, original().layers[0].mlp.experts.up_proj[1:3, 8:40])
    assert sum(x.size for x in read) == part.size
