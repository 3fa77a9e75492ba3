"""The examples run as the README says."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess:
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # most of the time is compilation
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **quick}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_demo_decodes_and_equals_the_plain_recurrence():
    done = run("examples/decode_qwen_like.py", "--max_tokens=24", "--batch=2", "--check")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("In the beginning ")
    assert "checkpoint writes: 12 instead of 276" in done.stderr
    assert "all 48 tokens equal the plain recurrence's" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint=nowhere"], "nowhere/config.json does not exist"),
        (["--prompt="], "--prompt holds no text"),
        (["--implementation=pallas"], "'xla' runs anywhere"),
    ],
)
def test_demo_says_what_is_wrong_in_one_line(arguments, message):
    done = run("examples/decode_qwen_like.py", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_swap_mixer_decodes_the_same_before_and_after():
    done = run("examples/swap_mixer.py")
    assert done.returncode == 0, done.stderr
    assert "relative difference" in done.stdout


@pytest.mark.long
def test_speculation_gives_the_plain_text_in_fewer_rounds():
    """On text that repeats itself more than 1.5 tokens per round."""
    done = run("examples/speculative_decode.py", "--max_tokens=120", "--drafts=3")
    assert done.returncode == 0, done.stderr
    assert "all 120 tokens equal plain decoding's" in done.stderr
    assert float(done.stderr.split(" tokens per round")[0].split()[-1]) > 1.5
