"""The README's code runs as it stands, given the inputs that it names."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from replayssm_jax.decoding.text import ByteTokenizer
from replayssm_jax.mixers import Mamba2, Mamba2Config
from replayssm_jax.models import from_pretrained

ROOT = pathlib.Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_readme_has_the_blocks_tested_here():
    assert len(BLOCKS) == 4


def test_readme_core_example_runs():
    names: dict = {}
    exec(BLOCKS[0], names)
    assert names["out"].shape == (2, 4, 8, 64)
    np.testing.assert_array_equal(names["state"].pointer.position, [104, 101])


@pytest.mark.parametrize("swapped", [False, pytest.param(True, marks=pytest.mark.long)], ids=["gated_delta_net", "mamba2"])
def test_readme_mixer_example_runs_with_either_line(swapped):
    source = BLOCKS[1]
    if swapped:
        before, line, after = source.partition("mixer = GatedDeltaNet(config, rngs=nnx.Rngs(0))\n")
        assert line
        source = before + after.replace("# mixer = ", "mixer = ")
    names = {"nnx": nnx, "jnp": jnp, "T": 5, "Mamba2": Mamba2, "Mamba2Config": Mamba2Config}
    names |= {"prompt": jnp.ones((2, 5, 256)), "x": jnp.ones((2, 1, 256))}
    exec(source, names)
    assert isinstance(names["mixer"], Mamba2) == swapped
    assert names["y"].shape == (2, 1, 256)
    np.testing.assert_array_equal(names["pointer"].position, [6, 6])


def test_readme_model_example_runs():
    source = BLOCKS[2].replace("folder/with/config.json/and/safetensors", str(ROOT / "tests/goldens/mamba2"))
    names = {"jnp": jnp, "prompts": jnp.ones((8, 6), jnp.int32), "lengths": jnp.arange(1, 7).repeat(2)[:8]}
    names |= {"drafts": jnp.ones((8, 1), jnp.int32), "accepted": 1}
    exec(source, names)
    assert names["logits"].shape == (8, 1, 128)


@pytest.mark.usefixtures("quick_compiles")
def test_readme_decoding_example_runs(capsys):
    model = from_pretrained(ROOT / "tests/goldens/mamba2")
    names: dict = {"model": model, "tokenizer": ByteTokenizer(128)}
    exec(BLOCKS[3], names)
    assert len(names["answer"].tokens) == 80
    assert names["request"].done
    assert capsys.readouterr().out == names["request"].text
    names["engine"].run()
    assert names["fork"].done
