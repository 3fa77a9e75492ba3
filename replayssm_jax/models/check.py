"""Reproduces golden folders: recorded tokens, logits and states of a published implementation.

    python -m replayssm_jax.models.check FOLDER... [--implementation=xla] [--dtype=float32]

Each folder is run in three ways: greedy one-token steps; verify with 2..5 drafts per row, of which a random prefix is right and
accepted; and prefill of the prompt in pieces, extended by more of the text, then steps. A line per way says whether the tokens
are equal and how large the errors are; the exit status is 1 if any line misses. With --dtype=bfloat16 the tokens are forced and
the errors are reported without a bound.

The folder's format is described in tests/goldens/README.md.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from replayssm_jax.mixers import MixerCache
from replayssm_jax.models import CheckpointError, Decoder, ModelCache, from_pretrained
from replayssm_jax.models.check_mixer import check_mixer
from replayssm_jax.replay import materialize
from replayssm_jax.state import ReplayPolicy

# absolute, of logits; relative to max(1, largest), of recurrent states and convolution inputs
LOGITS, STATES, CONV = 3e-4, 2e-5, 1e-5
MAX_DRAFT = 5


@dataclasses.dataclass
class Errors:
    """The largest errors of one way through a folder."""

    way: str
    tokens_equal: bool | None = True  # None where tokens are forced
    logits: float = 0.0
    states: float = 0.0
    conv: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.tokens_equal) and self.logits <= LOGITS and self.states <= STATES and self.conv <= CONV

    def __str__(self) -> str:
        tokens = {True: "equal", False: "DIFFER", None: "forced"}[self.tokens_equal]
        return f"{self.way:<8} tokens {tokens:<6}  logits {self.logits:.1e}  states {self.states:.1e}  conv {self.conv:.1e}"


class Golden:
    """A golden folder and its model, compiled once per shape."""

    def __init__(self, folder: pathlib.Path, dtype: str, implementation: str | None):
        self.model: Decoder = from_pretrained(folder, dtype)
        self.exact = dtype == "float32"
        self.tensors = {**load_file(folder / "golden.safetensors"), **load_file(folder / "states.safetensors")}
        self.prompt, self.tokens = self.tensors["prompt"], self.tensors["tokens"]
        if not any(name.endswith("recurrent_state") for name in self.tensors):
            raise CheckpointError(f"{folder}/states.safetensors holds no recurrent state to compare with")
        self.boundaries = sorted({int(name[4:].split(".")[0]) for name in self.tensors if name.startswith("step")})
        graph, self.weights = nnx.split(self.model)

        def call(method: str) -> Callable:
            def run(weights: Any, cache: ModelCache, *arguments: jax.Array) -> tuple[ModelCache, jax.Array]:
                model = nnx.merge(graph, weights)
                return getattr(model, method)(cache, *arguments, implementation=implementation)

            return jax.jit(run, donate_argnums=1)

        self._prefill, self._verify = call("prefill"), call("verify")

    def new_cache(self) -> ModelCache:
        rows, longest = self.prompt.shape[0], self.prompt.shape[1] + self.tokens.shape[1] + MAX_DRAFT
        return self.model.init_cache(rows, longest, ReplayPolicy(max_draft=MAX_DRAFT, record_dtype=self.model.dtype))

    def prefill(self, cache: ModelCache, tokens: np.ndarray) -> tuple[ModelCache, np.ndarray]:
        cache, logits = self._prefill(self.weights, cache, jnp.asarray(tokens))
        return cache, np.asarray(logits)

    def verify(self, cache: ModelCache, tokens: np.ndarray, lengths: np.ndarray) -> tuple[ModelCache, np.ndarray]:
        cache, logits = self._verify(self.weights, cache, jnp.asarray(tokens), None, jnp.asarray(lengths))
        return cache, np.asarray(logits)

    def compare_logits(self, errors: Errors, row: int, position: int, logits: np.ndarray) -> None:
        """Logits after ``position`` tokens of the continuation, against the recorded ones and the token they choose."""
        errors.logits = _worst(errors.logits, np.abs(logits - self.tensors["logits"][row, position]).max())
        if self.exact and position < self.tokens.shape[1]:
            errors.tokens_equal = errors.tokens_equal and bool(logits.argmax() == self.tokens[row, position])

    def compare_states(self, errors: Errors, cache: ModelCache, position: int) -> None:
        """Recurrent states and convolution inputs after ``position`` tokens of the continuation."""
        for name, recorded in self.tensors.items():
            if not name.startswith(f"step{position}.layer"):
                continue
            layer = cache.layers[int(name.split("layer")[1].split(".")[0])]
            if name.endswith("recurrent_state"):
                errors.states = _worst(errors.states, _state_error(layer, cache, recorded))
            else:
                errors.conv = _worst(errors.conv, _conv_error(layer, cache, recorded))


def _worst(so_far: float, error: Any) -> float:
    """The larger error; NaN stays NaN, which no bound admits."""
    return float(np.maximum(so_far, error))


def _state_error(layer: MixerCache, cache: ModelCache, recorded: np.ndarray) -> float:
    state = np.asarray(materialize(layer.state(cache.pointer)))
    if layer.recurrence.delta_rule:  # recorded key-major
        state = state.swapaxes(-1, -2)
    return float(np.abs(state - recorded).max() / max(1.0, np.abs(recorded).max()))


def _conv_error(layer: MixerCache, cache: ModelCache, recorded: np.ndarray) -> float:
    """Of the inputs that the next token needs: one fewer than recorded, which holds the newest token's own whole window."""
    needed = recorded.shape[-1] - 1
    ring = np.asarray(layer.conv.astype(jnp.float32))
    position = np.asarray(cache.pointer.position)[:, None] - needed + np.arange(needed)
    kept = np.where((position >= 0)[..., None], ring[np.arange(len(ring))[:, None], position % ring.shape[1]], 0)
    return float(np.abs(kept - recorded[..., 1:].swapaxes(-1, -2)).max() / max(1.0, np.abs(recorded).max()))


def check_steps(golden: Golden) -> Errors:
    """Greedy decoding, one token at a time; tokens are forced where they are not expected to be equal."""
    errors = Errors("steps")
    cache, logits = golden.prefill(golden.new_cache(), golden.prompt)
    _steps(golden, errors, cache, logits, 0)
    return errors


def _steps(golden: Golden, errors: Errors, cache: ModelCache, logits: np.ndarray, start: int) -> None:
    rows, count = golden.tokens.shape
    ones = np.ones(rows, np.int32)
    for position in range(start, count + 1):
        for row in range(rows):
            golden.compare_logits(errors, row, position, logits[row])
        golden.compare_states(errors, cache, position)
        if position < count:
            token = logits.argmax(axis=-1) if golden.exact else golden.tokens[:, position]
            cache, out = golden.verify(cache, token[:, None].astype(np.int32), ones)
            cache, logits = golden.model.commit(cache, 1), out[:, 0]


def check_drafts(golden: Golden, seed: int = 0) -> Errors:
    """Drafts that are right up to a random place, of random number per row, accepted up to that place."""
    errors, rng = Errors("drafts"), np.random.default_rng(seed)
    cache, logits = golden.prefill(golden.new_cache(), golden.prompt)
    rows, count = golden.tokens.shape
    position = np.zeros(rows, int)
    for row in range(rows):
        golden.compare_logits(errors, row, 0, logits[row])
    for boundary in [*golden.boundaries, count]:
        while (position < boundary).any():
            lengths = np.where(position < boundary, rng.integers(2, MAX_DRAFT + 1, rows), 0)
            accepted = np.minimum(rng.integers(0, lengths + 1), boundary - position)
            drafts = rng.integers(0, golden.model.config.vocab_size, (rows, MAX_DRAFT))
            for row in range(rows):
                drafts[row, : accepted[row]] = golden.tokens[row, position[row] : position[row] + accepted[row]]
            cache, out = golden.verify(cache, drafts.astype(np.int32), lengths.astype(np.int32))
            for row in range(rows):
                for i in range(accepted[row]):
                    golden.compare_logits(errors, row, position[row] + i + 1, out[row, i])
            cache = golden.model.commit(cache, jnp.asarray(accepted, jnp.int32))
            position += accepted
        golden.compare_states(errors, cache, boundary)
    return errors


def check_prefill(golden: Golden, seed: int = 0) -> Errors:
    """The prompt and a third of its continuation as prompts in pieces of random sizes, then steps."""
    errors, rng = Errors("prefill"), np.random.default_rng(seed)
    extension = golden.tokens.shape[1] // 3
    text = np.concatenate([golden.prompt, golden.tokens[:, :extension]], axis=1)
    cache, logits, start = golden.new_cache(), np.zeros(()), 0
    while start < text.shape[1]:
        end = min(text.shape[1], start + int(rng.choice([1, 2, 3, 17, 40])))
        cache, logits = golden.prefill(cache, text[:, start:end])
        start = end
    _steps(golden, errors, cache, logits, extension)
    return errors


def check_folder(folder: pathlib.Path, dtype: str, implementation: str | None) -> Iterator[tuple[str, bool]]:
    """A line per way through a golden folder, and whether it passed."""
    meta = json.loads((folder / "meta.json").read_text()) if (folder / "meta.json").is_file() else {}
    if meta.get("mixer_only"):
        yield from check_mixer(folder, STATES, implementation)
        return
    golden = Golden(folder, dtype, implementation)
    for check in (check_steps, check_drafts, check_prefill):
        errors = check(golden)
        errors.tokens_equal = errors.tokens_equal if golden.exact else None
        finite = bool(np.isfinite([errors.logits, errors.states, errors.conv]).all())
        yield str(errors), errors.passed if golden.exact else finite


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        raise app.UsageError("name at least one golden folder")
    missed = 0
    for folder in map(pathlib.Path, arguments[1:]):
        try:
            for line, passed in check_folder(folder, flags.FLAGS.dtype, flags.FLAGS.implementation):
                missed += not passed
                print(f"{'ok  ' if passed else 'MISS'} {folder.name:<14} {line}", flush=True)
        except (ValueError, TypeError, KeyError, NotImplementedError, OSError, SafetensorError) as error:
            missed += 1
            print(f"MISS {folder.name:<14} {type(error).__name__}: {error}", flush=True)
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and activations.")
    flags.DEFINE_enum("implementation", None, ["reference", "xla", "pallas"], "Backend; default: the fastest that can.")
    app.run(main)
