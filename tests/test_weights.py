"""Checkpoint folders: every published layout loads to the same weights, and every broken one is a named error."""

import json
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from replayssm_jax.models import CheckpointError, Qwen3_5, Qwen3_5Config, from_pretrained
from replayssm_jax.models.qwen3_5 import published_sources
from replayssm_jax.models.weights import Checkpoint, Source, load_into, published_tensors, read_config
from tests.golden_data import load, read_json
from tests.mixer_runs import quick_jit
from tests.model_runs import FOLDER, model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONV = "model.layers.0.linear_attn.conv1d.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
A_LOG = "model.layers.2.linear_attn.A_log"


def config(**changes: Any) -> dict[str, Any]:
    """The golden's config with some keys changed; a value of ``...`` removes the key."""
    return {key: value for key, value in (read_json("qwen3_5", "config") | changes).items() if value is not ...}


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    """The golden's tensors with some changed, named with __ for dots; None removes one."""
    changed = load("qwen3_5", "model") | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in changed.items() if value is not None}


def write(folder, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 0):
    """A checkpoint folder; with ``shards``, that many files and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    if not shards:
        save_file(tensors, folder / SINGLE)
        return folder
    files = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": sorted(tensors)[i::shards] for i in range(shards)}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def check_same_weights(subject: Qwen3_5, other: Qwen3_5) -> None:
    left, right = (nnx.to_flat_state(nnx.state(m, nnx.Param)) for m in (subject, other))
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, a), (_, b) in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.get_value(), b.get_value(), err_msg=str(path))


def test_sharded_folder(tmp_path):
    check_same_weights(Qwen3_5.from_pretrained(write(tmp_path, config(), tensors(), shards=3)), model())


def test_index_is_preferred_to_a_stray_single_file(tmp_path):
    write(tmp_path, config(), {"other": np.zeros(1, np.float32)})
    check_same_weights(Qwen3_5.from_pretrained(write(tmp_path, config(), tensors(), shards=2)), model())


@pytest.mark.parametrize("shards", [0, 3])
def test_multimodal_folder_gives_its_text_model(tmp_path, shards):
    """Published names carry model.language_model; the vision tower and the multi-token head are not for this model."""
    text = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors().items()}
    text["lm_head.weight"] = text.pop("lm_head.weight")
    extra = ("model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.layers.0.input_layernorm.weight")
    text |= {name: np.zeros((2, 3), np.float32) for name in extra}
    outer = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "hidden_size": 7,
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "qwen3_5_vision", "hidden_act": "gelu"},
        "text_config": config(),
    }
    check_same_weights(Qwen3_5.from_pretrained(write(tmp_path, outer, text, shards)), model())


def test_model_type_chooses_the_model(tmp_path):
    subject = from_pretrained(FOLDER)
    assert type(subject) is Qwen3_5
    check_same_weights(subject, model())
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match=r"model_type must be one of .*, got 'gpt2'"):
        from_pretrained(tmp_path)


def test_config_without_layer_types_has_full_attention_every_fourth():
    assert Qwen3_5Config.from_dict(config(layer_types=..., num_hidden_layers=8)).layer_types == (
        *("linear_attention",) * 3,
        "full_attention",
        *("linear_attention",) * 3,
        "full_attention",
    )
    every_second = Qwen3_5Config.from_dict(config(layer_types=..., full_attention_interval=2))
    assert every_second.layer_types == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize("key", ["rope_parameters", "text_config", "layer_types", "tie_word_embeddings"])
def test_null_in_a_config_means_absent(key):
    """As its publishers write it: "rope_scaling": null and the like."""
    got = Qwen3_5Config.from_dict(config(**{key: None}))
    assert got == Qwen3_5Config.from_dict(config(**{key: ...}))


def test_infinity_in_a_config_is_a_float(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, {"__float__": "Infinity"}]}')
    assert read_config(tmp_path) == {"time_step_limit": [0.0, float("inf")]}


def test_tied_embeddings(tmp_path):
    """A tied checkpoint publishes no lm_head and answers as an untied one whose head is its embedding."""
    embedding = tensors()["model.embed_tokens.weight"]
    tied = write(tmp_path / "tied", config(tie_word_embeddings=True), tensors(lm_head__weight=None))
    untied = write(tmp_path / "untied", config(), tensors(lm_head__weight=embedding))
    answers = []
    for folder in (tied, untied):
        graph, weights = nnx.split(Qwen3_5.from_pretrained(folder))
        tokens = load("qwen3_5", "golden")["prompt"]
        answers.append(quick_jit(lambda weights, graph=graph, tokens=tokens: nnx.merge(graph, weights)(tokens))(weights))
    np.testing.assert_allclose(*answers, atol=1e-5)
    assert np.abs(answers[0] - load("qwen3_5", "golden")["prompt_logits"]).max() > 1, "the heads do differ"


@pytest.mark.parametrize("tied", [False, True])
def test_saved_weights_load_again(tmp_path, tied):
    """From random weights through ``published_tensors`` and a folder back, bit for bit."""
    sizes = Qwen3_5Config.from_dict(
        config(tie_word_embeddings=tied, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    )
    subject = nnx.eval_shape(lambda: Qwen3_5(sizes, rngs=nnx.Rngs(3)))
    rng, state = np.random.default_rng(0), nnx.state(subject, nnx.Param)
    for _, variable in nnx.to_flat_state(state):
        variable.set_value(jnp.asarray(rng.standard_normal(variable.get_value().shape), jnp.float32))
    nnx.update(subject, state)
    published = dict(published_tensors(subject, published_sources(sizes)))
    layers = ["linear_attention", "full_attention"]
    folder = write(tmp_path, config(tie_word_embeddings=tied, layer_types=layers, num_hidden_layers=2), published)
    check_same_weights(Qwen3_5.from_pretrained(folder), subject)


def test_published_tensors_are_the_checkpoint():
    published = dict(published_tensors(model(), published_sources(model().config)))
    assert published.keys() == tensors().keys()
    for name, tensor in tensors().items():
        np.testing.assert_array_equal(published[name], tensor, err_msg=name)


def test_parameters_joined_from_several_tensors(tmp_path):
    """A source of two names fills one parameter; saving it is refused."""

    class Pair(nnx.Module):
        def __init__(self):
            self.both = nnx.Param(jnp.zeros((3, 2)))

    parts = {"a": np.ones((1, 2), np.float32), "b": np.full((2, 2), 2, np.float32)}
    pair, sources = nnx.eval_shape(Pair), {"both": Source.of("a", "b")}
    load_into(pair, sources, Checkpoint(write(tmp_path, {}, parts)))
    np.testing.assert_array_equal(pair.both[...], [[1, 1], [2, 2], [2, 2]])
    with pytest.raises(NotImplementedError, match=r"both is made of \('a', 'b'\)"):
        list(published_tensors(pair, sources))


def check_refused(folder, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Qwen3_5.from_pretrained(folder)


def test_missing_folder(tmp_path):
    check_refused(tmp_path / "nowhere", r"nowhere.config\.json does not exist")
    check_refused(str(tmp_path / "nowhere"), r"nowhere.config\.json does not exist")


def test_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config()))
    check_refused(tmp_path, rf"holds neither {SINGLE} nor {INDEX}")


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"\xff\xfe\x00"], ids=["cut off", "empty", "no object", "no text"])
def test_config_that_is_no_json_object(tmp_path, content):
    (write(tmp_path, config(), tensors()) / "config.json").write_bytes(content)
    check_refused(tmp_path, r"config\.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be one of qwen3_5, qwen3_5_text, got 'llama'"),
        ({"model_type": ...}, "model_type .* got None"),
        ({"model_type": "qwen3_5_moe"}, "model_type .* got 'qwen3_5_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types holds sliding_attention"),
        ({"layer_types": ..., "num_hidden_layers": ...}, "lacks layer_types and num_hidden_layers"),
        ({"num_hidden_layers": 9}, "num_hidden_layers"),
        ({"vocab_size": ...}, "lacks vocab_size"),
        ({"head_dim": ..., "hidden_size": ...}, "lacks hidden_size, head_dim"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"intermediate_size": -96}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be divisible by num_key_value_heads=3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads|num_key_heads"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads|num_key_heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim|conv_width"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor must be even, got 3"),
    ],
    ids=lambda value: ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_config_values_that_this_model_does_not_have(tmp_path, changes, message):
    check_refused(write(tmp_path, config(**changes), tensors()), message)


@pytest.mark.parametrize("shards", [0, 2])
def test_missing_tensors_are_named(tmp_path, shards):
    folder = write(tmp_path, config(), tensors(**{GATE: None, CONV: None}), shards)
    check_refused(folder, f"lacks tensors: {CONV}, {GATE}$")


def test_many_missing_tensors_are_counted(tmp_path):
    kept = {name: tensor for name, tensor in tensors().items() if ".mlp." not in name}
    check_refused(write(tmp_path, config(), kept), "lacks tensors: (model.layers[a-z_.0-9]+, ){4}[a-z_.0-9]+ and 7 more")


def test_unknown_tensors_are_named(tmp_path):
    extra = {"model.layers.0.linear_attn.in_proj_qkvz.weight": np.zeros((1, 1), np.float32)}
    check_refused(write(tmp_path, config(), tensors(**extra)), r"holds unknown tensors: model\.layers\.0\..*in_proj_qkvz")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((GATE, shape) for shape in [(96, 63), (64, 96), (96,), (96, 64, 1), ()]),
        *((CONV, shape) for shape in [(128, 4), (128, 2, 4), (128, 1, 3), (128,), (4, 1, 128), ()]),
        *((A_LOG, shape) for shape in [(5,), (), (1, 1, 4, 1)]),
        ("model.embed_tokens.weight", (127, 64)),
    ],
)
def test_tensors_of_another_shape_are_named(tmp_path, name, shape):
    """A wrong size or rank, in every layout."""
    folder = write(tmp_path, config(), tensors(**{name: np.zeros(shape, np.float32)}))
    check_refused(folder, f"{name}.* shape")


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.int64, ml_dtypes.float8_e4m3fn])
def test_quantised_tensors_are_refused(tmp_path, dtype):
    """Quantised weights without their scales would load as nonsense."""
    folder = write(tmp_path, config(), tensors(**{GATE: tensors()[GATE].astype(dtype)}))
    name = "F8_E4M3" if dtype == ml_dtypes.float8_e4m3fn else np.dtype(dtype).name
    check_refused(folder, f"{GATE}.* {name}; only unquantised")


@pytest.mark.parametrize("keep", [0, 5, 1000, -100], ids=["empty", "length cut", "header cut", "data cut"])
def test_corrupted_tensor_file(tmp_path, keep):
    path = write(tmp_path, config(), tensors()) / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    check_refused(tmp_path, f"{SINGLE} is not a readable safetensors file")


def test_folder_in_place_of_a_tensor_file(tmp_path):
    (tmp_path / SINGLE).mkdir()
    (tmp_path / "config.json").write_text(json.dumps(config()))
    check_refused(tmp_path, SINGLE)


def test_corrupted_shard(tmp_path):
    path = write(tmp_path, config(), tensors(), shards=2) / "model-00002-of-00002.safetensors"
    path.write_bytes(b"not a tensor file")
    check_refused(tmp_path, f"{path.name} is not a readable safetensors file")


def test_index_that_names_a_missing_file(tmp_path):
    (write(tmp_path, config(), tensors(), shards=2) / "model-00001-of-00002.safetensors").unlink()
    check_refused(tmp_path, "names model-00001-of-00002.safetensors, which does not exist")


def test_index_that_names_the_wrong_file(tmp_path):
    path = write(tmp_path, config(), tensors(), shards=2) / INDEX
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][GATE] = next(file for file in files if file != index["weight_map"][GATE])
    path.write_text(json.dumps(index))
    check_refused(tmp_path, f"says model-0000[12]-of-00002.safetensors holds {GATE}, but it does not")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_index_that_is_no_index(tmp_path, content):
    (write(tmp_path, config(), tensors(), shards=2) / INDEX).write_text(content)
    check_refused(tmp_path, INDEX)
