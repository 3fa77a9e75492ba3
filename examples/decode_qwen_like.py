"""Decodes text with a Qwen3.5-style hybrid through the replay path, token by token as it comes.

    python examples/decode_qwen_like.py                                    # the embedded demo model
    python examples/decode_qwen_like.py --prompt="And it came to pass" --temperature=0 --check
    python examples/decode_qwen_like.py --checkpoint=FOLDER --prompt_file=prompts.txt

Without --checkpoint it runs the small byte-level model in examples/demo_model. A folder holds config.json, safetensors and,
unless its vocabulary is bytes, tokenizer.json. At the end it says how fast it was and what the replay path saved.
"""

import dataclasses
import functools
import logging
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from replayssm_jax import ReplayPolicy
from replayssm_jax.decoding.sampling import Sampling, SamplingParams, sample
from replayssm_jax.decoding.text import TextStream, Tokenizer, load_tokenizer, pad_prompts
from replayssm_jax.mixers import MixerCache
from replayssm_jax.models import CheckpointError, ModelCache, Qwen3_5
from replayssm_jax.state import num_bytes

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", str(pathlib.Path(__file__).parent / "demo_model"), "Folder in published layout.")
flags.DEFINE_string("prompt", "In the beginning ", "Text to continue.")
flags.DEFINE_string("prompt_file", None, "File with one prompt per line, instead of --prompt.")
flags.DEFINE_integer("max_tokens", 400, "Tokens to decode per sequence.", lower_bound=1)
flags.DEFINE_integer("batch", None, "Sequences to decode together; prompts are repeated to fill it. Default: one each.", 1)
flags.DEFINE_integer("window", 16, "Ring rows: tokens between two writes of the checkpoint, plus one.", lower_bound=2)
flags.DEFINE_float("temperature", 0.7, "0 is greedy.", lower_bound=0.0)
flags.DEFINE_float("top_p", 0.95, "Nucleus to draw from.", lower_bound=0.0, upper_bound=1.0)
flags.DEFINE_integer("seed", 0, "Of the first sequence's draws; the next one's is one more.", 0, 2**31)
flags.DEFINE_enum("implementation", None, ["reference", "xla", "pallas"], "Backend; default: the fastest that can.")
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and activations; states stay float32.")
flags.DEFINE_bool("check", False, "Decode again with the plain per-token recurrence and compare the tokens.")


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a run gave: tokens [B, max_tokens], flushes of a layer over all rows, seconds of decoding, the cache."""

    tokens: np.ndarray
    flushes: int
    seconds: float
    cache: ModelCache


def read_prompts() -> list[str]:
    """The prompts of this run, repeated to fill --batch."""
    if FLAGS.prompt_file is None:
        prompts = [FLAGS.prompt]
    else:
        prompts = [line for line in pathlib.Path(FLAGS.prompt_file).read_text().splitlines() if line.strip()]
    if not prompts or not all(prompts):
        raise ValueError(f"{'--prompt' if FLAGS.prompt_file is None else '--prompt_file'} holds no text to continue")
    batch = len(prompts) if FLAGS.batch is None else FLAGS.batch
    if batch < len(prompts):
        raise ValueError(f"--batch={batch} is less than the {len(prompts)} prompts of --prompt_file")
    return [prompts[i % len(prompts)] for i in range(batch)]


def decode(
    model: Qwen3_5, prompts: list[list[int]], policy: ReplayPolicy, implementation: str | None, show: TextStream | None
) -> Decoded:
    """Prefills all prompts, then decodes --max_tokens of each, showing the first row's text as it comes."""
    graph, weights = nnx.split(model)
    tokens, lengths = pad_prompts(prompts)
    asked = [SamplingParams(temperature=FLAGS.temperature, top_p=FLAGS.top_p, seed=FLAGS.seed + i) for i in range(len(prompts))]
    sampling = Sampling.of(asked)
    run = functools.partial(jax.jit, donate_argnums=1)

    def choose(cache: ModelCache, logits: jax.Array) -> jax.Array:
        # a token from a distribution of NaN would look like any other: -1 marks it
        finite = jnp.isfinite(logits).all(axis=-1)
        return jnp.where(finite, sample(logits, sampling, cache.pointer.position), -1)

    @run
    def prefill(weights: Any, cache: ModelCache, tokens: jax.Array, lengths: jax.Array) -> tuple[ModelCache, jax.Array]:
        cache, logits = nnx.merge(graph, weights).prefill(cache, tokens, lengths, implementation=implementation)
        return cache, choose(cache, logits)

    @run
    def step(weights: Any, cache: ModelCache, token: jax.Array) -> tuple[ModelCache, jax.Array, jax.Array]:
        flushes = jnp.sum(cache.pointer.due)
        model = nnx.merge(graph, weights)
        cache, logits = model.verify(cache, token[:, None], implementation=implementation)
        cache = model.commit(cache, 1)
        return cache, choose(cache, logits[:, 0]), flushes

    cache = model.init_cache(len(prompts), tokens.shape[1] + FLAGS.max_tokens, policy)
    cache, token = prefill(weights, cache, jnp.asarray(tokens), jnp.asarray(lengths))
    compiled = step.lower(weights, cache, token).compile()  # before the clock starts
    chosen, flushes = [], []
    started = time.perf_counter()
    for i in range(FLAGS.max_tokens):
        chosen.append(np.asarray(token))
        if (chosen[-1] < 0).any():
            raise ValueError(f"the model's logits are not finite after {i} tokens: its weights are damaged")
        if show is not None:
            print(show.push(int(chosen[-1][0])), end="", flush=True)
        if i + 1 < FLAGS.max_tokens:
            cache, token, flushed = compiled(weights, cache, token)
            flushes.append(flushed)
    seconds = time.perf_counter() - started
    return Decoded(np.stack(chosen, axis=1), int(sum(map(int, flushes))), seconds, cache)


def report(decoded: Decoded) -> None:
    """One summary: speed, and what was written against the plain recurrence, which writes every state with every token."""
    mixers = [layer for layer in decoded.cache.layers if isinstance(layer, MixerCache)]
    rows, count = decoded.tokens.shape
    steps = rows * (count - 1)
    state = sum(num_bytes(m.checkpoint) for m in mixers) // rows
    record = sum(num_bytes(m.buffer) // m.policy.window for m in mixers) // rows
    plain, replay = steps * len(mixers), decoded.flushes * len(mixers)
    written = decoded.flushes * state + steps * record
    saved = 1 - written / (steps * state) if steps else 0.0
    print(
        f"\n\n{rows} x {count} tokens in {decoded.seconds:.2f} s: {rows * count / decoded.seconds:,.0f} tokens per second"
        f" on {jax.devices()[0].device_kind}\n"
        f"checkpoint writes: {replay:,} instead of {plain:,} for the plain recurrence ({len(mixers)} recurrent layers)\n"
        f"state bytes written: {_mib(written)} ({_mib(steps * record)} of it records) instead of {_mib(steps * state)}, "
        f"{saved:.0%} less",
        file=sys.stderr,
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def print_text(tokenizer: Tokenizer, prompt: str, tokens: np.ndarray) -> None:
    stream = tokenizer.stream()
    print(f"\n\n> {prompt}" + "".join(map(stream.push, tokens.tolist())) + stream.close())


def main(_: list[str]) -> None:
    # absl shows what JAX says of each kind of device that is not there
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        model = Qwen3_5.from_pretrained(FLAGS.checkpoint, dtype=FLAGS.dtype)
        tokenizer = load_tokenizer(FLAGS.checkpoint, model.config.vocab_size)
        texts = read_prompts()
        prompts = [tokenizer.encode(text) for text in texts]
        policy = ReplayPolicy(window=FLAGS.window, record_dtype=FLAGS.dtype)
        print(texts[0], end="", flush=True)
        shown = tokenizer.stream()
        decoded = decode(model, prompts, policy, FLAGS.implementation, shown)
        print(shown.close(), end="", flush=True)
    except (CheckpointError, ModuleNotFoundError, NotImplementedError, OSError, ValueError) as error:
        raise SystemExit(f"decode_qwen_like.py: {error}") from error
    for text, tokens in zip(texts[1:], decoded.tokens[1:], strict=True):
        print_text(tokenizer, text, tokens)
    report(decoded)
    if FLAGS.check:
        # window=2 folds every token into the checkpoint, one token at a time: the plain recurrence
        plain = decode(model, prompts, dataclasses.replace(policy, window=2), "reference", None)
        differing = np.flatnonzero((plain.tokens != decoded.tokens).any(axis=0))
        if differing.size:
            raise SystemExit(f"check: tokens differ from the plain recurrence, first at token {differing[0]}")
        print(f"check: all {decoded.tokens.size:,} tokens equal the plain recurrence's", file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
