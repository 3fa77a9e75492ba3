"""Speculative decoding by pointer on the demo model: the text, what was drafted and kept, what was written, how fast it was.

    python examples/speculative_decode.py                                  # drafts from the text itself
    python examples/speculative_decode.py --draft=itself --drafts=6        # drafts that are always right: the most there is
    python examples/speculative_decode.py --checkpoint=FOLDER --draft=mtp --prompt="..."

Decodes the prompt twice, token by token and with drafts, and compares: a draft is appended behind the committed records, the
model answers all of a round's drafts in one pass, and accepting some of them moves a pointer. Nothing is copied beforehand and
nothing is restored afterwards. Texts that differ are an error in float32; bfloat16 may round to another token.
"""

import itertools
import logging
import operator
import pathlib
import sys
import time

import jax
from absl import app, flags

from replayssm_jax.decoding import (
    Drafter,
    Engine,
    MultiTokenPrediction,
    PromptLookup,
    Request,
    RequestError,
    SamplingParams,
    SmallModel,
)
from replayssm_jax.decoding.text import load_tokenizer
from replayssm_jax.mixers import MixerCache
from replayssm_jax.models import CheckpointError, Decoder, from_pretrained
from replayssm_jax.models.qwen3_5_mtp import Qwen3_5MTP

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", str(pathlib.Path(__file__).parent / "demo_model"), "Folder in published layout.")
flags.DEFINE_string(
    "prompt",
    "And Seth lived an hundred and five years, and begat Enos: And Seth lived after he begat Enos eight hundred and seven"
    " years, and begat sons and daughters: And all the days of Seth were nine hundred and twelve years: and he died.\n"
    "And Enos lived ninety years, and begat Cainan: And Enos lived after he begat Cainan eight hundred and fifteen years, "
    "and begat sons and daughters: ",
    "Text to continue; one that repeats itself gives lookup something to find.",
)
flags.DEFINE_integer("max_tokens", 300, "Tokens to decode.", lower_bound=1)
flags.DEFINE_enum("draft", "lookup", ["lookup", "itself", "mtp"], "Who drafts: the text, the model itself, or its own head.")
flags.DEFINE_integer("drafts", 4, "Drafts of a round.", lower_bound=1)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
flags.DEFINE_integer("seed", 0, "Of the draws.", 0, 2**32 - 1)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and activations; states stay float32.")


def make_drafter(model: Decoder) -> Drafter:
    if FLAGS.draft == "lookup":
        return PromptLookup(FLAGS.drafts)
    if FLAGS.draft == "itself":
        return SmallModel(model, FLAGS.drafts)
    return MultiTokenPrediction(Qwen3_5MTP.from_pretrained(FLAGS.checkpoint, FLAGS.dtype), FLAGS.drafts)


class Run:
    """One engine with one slot, and the prompt's way through it."""

    def __init__(self, model: Decoder, drafter: Drafter):
        self.tokenizer = load_tokenizer(FLAGS.checkpoint, model.config.vocab_size)
        length = len(self.tokenizer.encode(FLAGS.prompt)) + FLAGS.max_tokens
        self.engine = Engine(model, drafter=drafter, tokenizer=self.tokenizer, num_slots=1, max_length=length, prefill_rows=1)
        self.seconds = 0.0

    def decode(self, *, show: bool) -> Request:
        """Decodes once to compile, and once to show and to time."""
        self.engine.submit(FLAGS.prompt, SamplingParams(max_tokens=1)).result()
        params = SamplingParams(max_tokens=FLAGS.max_tokens, temperature=FLAGS.temperature, seed=FLAGS.seed)
        request = self.engine.submit(FLAGS.prompt, params)
        while not request.tokens:  # its prompt is no part of the time
            self.engine.step(1)
        started = time.perf_counter()
        for delta in request:
            if show:
                print(delta.text, end="", flush=True)
        self.seconds = time.perf_counter() - started
        return request

    def report(self, name: str) -> str:
        sequences = self.engine.pool.sequences
        counts = {key: int(getattr(sequences.counts, key)[0]) for key in ("rounds", "drafted", "accepted", "flushes")}
        tokens = FLAGS.max_tokens
        layers = sum(isinstance(layer, MixerCache) for layer in sequences.cache.layers)
        drafts = f"{counts['accepted']} of {counts['drafted']} drafts kept" if counts["drafted"] else "no drafts"
        return (
            f"{name:<8} {counts['rounds']:>4} rounds, {tokens / counts['rounds']:.2f} tokens per round, {drafts}, "
            f"{counts['flushes'] * layers} checkpoint writes, {tokens / self.seconds:,.0f} tokens per second"
        )


def main(_: list[str]) -> None:
    # absl shows what JAX says of each kind of device that is not there
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        model = from_pretrained(FLAGS.checkpoint, dtype=FLAGS.dtype)
        drafted, plain = Run(model, make_drafter(model)), Run(model, Drafter())
        print(FLAGS.prompt, end="", flush=True)
        request, other = drafted.decode(show=True), plain.decode(show=False)
    except (CheckpointError, ModuleNotFoundError, NotImplementedError, RequestError, OSError, ValueError) as error:
        raise SystemExit(f"speculative_decode.py: {error}") from error
    layers = sum(isinstance(layer, MixerCache) for layer in plain.engine.pool.sequences.cache.layers)
    print(f"\n\n{drafted.report(FLAGS.draft)}\n{plain.report('plain')}", file=sys.stderr)
    print(
        f"{drafted.seconds and plain.seconds / drafted.seconds:.2f}x as fast on {jax.devices()[0].device_kind}; "
        f"the plain recurrence would write {FLAGS.max_tokens * layers} checkpoints, and a snapshot for every draft",
        file=sys.stderr,
    )
    if FLAGS.temperature == 0 or FLAGS.draft != "itself":
        equal = sum(itertools.accumulate(map(operator.eq, request.tokens, other.tokens), operator.and_))
        if equal == len(request.tokens):
            print(f"all {equal} tokens equal plain decoding's", file=sys.stderr)
        elif FLAGS.dtype == "float32":
            raise SystemExit("the drafted text differs from the plain one")
        else:  # passes of several tokens round otherwise than passes of one
            print(f"the first {equal} tokens equal plain decoding's; then {FLAGS.dtype} rounds to others", file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
