"""Every golden folder passes the check that ships with the models, and a wrong model does not."""

import pathlib
import shutil
import types

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from replayssm_jax.models.check import check_folder, main

GOLDENS = pathlib.Path(__file__).parent / "goldens"
FOLDERS = sorted(path for path in GOLDENS.iterdir() if path.is_dir())


# A mixer and a model here, all of them in `make long`; Qwen3.5's recording has tests of its own.
QUICK = ("glm5_next_kda", "mamba2")


@pytest.mark.parametrize(
    "folder",
    [path if path.name in QUICK else pytest.param(path, marks=pytest.mark.long) for path in FOLDERS],
    ids=lambda path: path.name,
)
def test_golden_folder_is_reproduced(folder):
    lines = list(check_folder(folder, "float32", None))
    assert lines
    assert all(passed for _, passed in lines), "\n".join(line for line, _ in lines)


def test_check_misses_a_model_whose_decay_is_slightly_off(tmp_path):
    folder = tmp_path / "mamba2"
    shutil.copytree(GOLDENS / "mamba2", folder)
    tensors = load_file(folder / "model.safetensors")
    name = "backbone.layers.1.mixer.A_log"
    save_file({**tensors, name: (tensors[name] + np.float32(2e-3)).astype(np.float32)}, folder / "model.safetensors")
    _, passed = next(check_folder(folder, "float32", None))  # the first of its ways
    assert not passed


@pytest.mark.parametrize("file", ["states", "golden"])
def test_check_misses_recordings_of_nan(tmp_path, file):
    """NaN compares with nothing; it must not count as no error."""
    folder = tmp_path / "mamba2"
    shutil.copytree(GOLDENS / "mamba2", folder)
    tensors = load_file(folder / f"{file}.safetensors")
    broken = {name: np.full_like(x, np.nan) if x.dtype == np.float32 else x for name, x in tensors.items()}
    save_file(broken, folder / f"{file}.safetensors")
    _, passed = next(check_folder(folder, "float32", None))  # the first of its ways
    assert not passed


def test_check_names_a_folder_that_is_no_checkpoint_and_fails(tmp_path, capsys, monkeypatch):
    options = types.SimpleNamespace(FLAGS=types.SimpleNamespace(dtype="float32", implementation=None))
    monkeypatch.setattr("replayssm_jax.models.check.flags", options)
    with pytest.raises(SystemExit) as stopped:
        main(["check", str(tmp_path)])
    assert stopped.value.code == 1
    assert "config.json" in capsys.readouterr().out
