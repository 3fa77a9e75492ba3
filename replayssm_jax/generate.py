"""Answers the prompts of a JSONL file with a checkpoint folder's model, several at a time.

    python -m replayssm_jax.generate FOLDER --prompts=prompts.jsonl --out=answers.jsonl [--slots=16] [--draft=lookup]

A line of the prompts is {"prompt": "text"} or {"tokens": [...]}, with an "id" if it shall have one other than its line number,
and any field of SamplingParams (max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, stop_tokens) that
shall differ from the flags. A line of the answers has the id, text, tokens, logprobs and finish_reason, or an error;
answers come in the order in which they are done.

An answer is on disk before the next one is written. After a crash the same command goes on where it was: what is there stays,
the rest is generated, nothing twice. An error is an answer too: delete its line to have the prompt tried again. The exit code
is 1 while the answers hold errors.
"""

import dataclasses
import fcntl
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from absl import app, flags

from replayssm_jax.decoding import Completion, Drafter, Engine, MultiTokenPrediction, PromptLookup, SamplingParams, SmallModel
from replayssm_jax.decoding.generating import Progress
from replayssm_jax.decoding.text import Tokenizer, load_tokenizer
from replayssm_jax.models import CheckpointError, Decoder, from_pretrained
from replayssm_jax.models.qwen3_5_mtp import Qwen3_5MTP
from replayssm_jax.models.weights import read_config

FLAGS = flags.FLAGS


def _define_flags() -> None:
    flags.DEFINE_string("prompts", None, "JSONL file of prompts.", required=True)
    flags.DEFINE_string("out", None, "JSONL file of answers; what it holds already is not generated again.", required=True)
    flags.DEFINE_integer("slots", 16, "Sequences decoded together.", lower_bound=1)
    flags.DEFINE_integer("max_length", 2048, "Longest prompt and answer together.", lower_bound=2)
    flags.DEFINE_bool("truncate", False, "Cut what is longer than --max_length, instead of reporting it as an error.")
    flags.DEFINE_integer("max_tokens", 256, "Most tokens of an answer.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
    flags.DEFINE_float("top_p", 1.0, "Nucleus to draw from.", lower_bound=0.0, upper_bound=1.0)
    flags.DEFINE_integer("top_k", 0, "Most likely tokens to draw from, 0 for all.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Of the first line's draws; each line after it has one more.", 0, 2**32 - 1)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and activations; states stay float32.")
    flags.DEFINE_enum("draft", None, ["lookup", "model", "mtp"], "Who proposes drafts; default: nobody.")
    flags.DEFINE_integer("drafts", 4, "Drafts of a round.", lower_bound=1)
    flags.DEFINE_string("draft_model", None, "Folder of the smaller model for --draft=model.")
    flags.DEFINE_enum("implementation", None, ["reference", "xla", "pallas"], "Backend; default: the fastest that can.")


@dataclasses.dataclass(frozen=True)
class Line:
    """One prompt of the file: its id, what it says, and what it asks for."""

    id: str | int
    prompt: str | list[int]
    params: SamplingParams


_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}


def read_prompts(path: pathlib.Path, defaults: dict[str, Any]) -> list[Line]:
    """The lines of a prompts file; empty ones are skipped.

    Raises:
        ValueError: a line is no prompt; the message says which line, and why.
    """
    lines: list[Line] = []
    seen: dict[str | int, int] = {}
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    for number, text in enumerate(content.split("\n"), start=1):  # JSON text may hold other line separators
        if not text.strip():
            continue
        try:
            line = _read_line(text, number, defaults)
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if line.id in seen:
            raise ValueError(f"{path}:{number}: id {line.id!r} is line {seen[line.id]}'s already")
        seen[line.id] = number
        lines.append(line)
    if not lines:
        raise ValueError(f"{path} holds no prompts")
    return lines


def _read_line(text: str, number: int, defaults: dict[str, Any]) -> Line:
    fields = json.loads(text)
    if not isinstance(fields, dict) or ("prompt" in fields) == ("tokens" in fields):
        raise ValueError('a line must be an object with "prompt" or "tokens"')
    if unknown := sorted(fields.keys() - _SAMPLING - {"id", "prompt", "tokens"}):
        raise ValueError(f"unknown fields {', '.join(unknown)}; known are id, prompt, tokens, {', '.join(sorted(_SAMPLING))}")
    prompt = fields["prompt"] if "prompt" in fields else fields["tokens"]
    if not isinstance(prompt, str if "prompt" in fields else list):
        raise TypeError(f"the prompt must be {'text' if 'prompt' in fields else 'a list of tokens'}, got {prompt!r}")
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise TypeError(f"id must be text or an integer, got {name!r}")
    asked = {**defaults, "seed": (defaults["seed"] + number - 1) % 2**32}
    asked |= {key: value for key, value in fields.items() if key in _SAMPLING}
    return Line(name, prompt, SamplingParams(**asked))


def open_answers(path: pathlib.Path, lines: list[Line]) -> tuple[TextIO, dict[str | int, str | None]]:
    """The answers file, locked and open behind its last whole line, and the ids that it holds, each with its error or None.

    A line that a crash has cut short is cut off: its prompt is answered again.

    Raises:
        ValueError: the file holds something else, answers other prompts, or another process writes it.
    """
    out = open(path, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
    try:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is writing {path}") from error
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        done = _answered(path, content[:end], {line.id: line for line in lines})
        if cut := content[end:]:
            if not any(_begins_alike(cut, line) for line in lines):
                raise ValueError(f"the last line of {path} is no answer of this command; it is left as it is")
            os.ftruncate(out.fileno(), end)  # only now: nothing of a file that is not ours has been touched
    except BaseException:
        out.close()
        raise
    return out, done


def _answered(path: pathlib.Path, content: bytes, prompts: dict[str | int, Line]) -> dict[str | int, str | None]:
    done: dict[str | int, str | None] = {}
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            answer = json.loads(text)
            name, prompt, error = answer["id"], answer["prompt"], answer.get("error")
            if isinstance(name, bool) or not isinstance(name, str | int) or not {"tokens", "error"} & answer.keys():
                raise ValueError("no answer")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as wrong:
            raise ValueError(f"{path}:{number} is no answer of this command; it is left as it is") from wrong
        if name not in prompts or prompts[name].prompt != prompt:
            raise ValueError(f"{path}:{number} answers id {name!r}, which is not what the prompts hold under that id")
        done[name] = error
    return done


def _begins_alike(cut: bytes, line: Line) -> bool:
    """Whether the beginning of a line may be that of a prompt's answer."""
    asked = json.dumps({"id": line.id, "prompt": line.prompt})[:-1]
    heads = (f'{asked}, "{field}": '.encode() for field in ("text", "error"))
    return any(cut.startswith(head) or head.startswith(cut) for head in heads)


def answer(engine: Engine, lines: list[Line]) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Runs lines through an engine; yields each with its answer as soon as it is done. A bad one is answered by its error."""
    waiting = iter(lines)
    running: dict[int, Line] = {}
    more = True
    while more or running:
        # a few more than there are slots, so that none is idle and a long file is not held in the queue
        while more and len(running) < 2 * engine.config.num_slots:
            line = next(waiting, None)
            if line is None:
                more = False
                break
            try:
                running[engine.submit(line.prompt, line.params).number] = line
            except (TypeError, ValueError) as error:
                yield line, {"error": str(error)}
        for request in engine.step():
            if request.done:
                yield running.pop(request.number), _describe(request.completion())


def _describe(completion: Completion) -> dict[str, Any]:
    names = ("text", "tokens", "logprobs", "finish_reason", "error")
    fields = {name: getattr(completion, name) for name in names}
    return {name: value for name, value in fields.items() if value is not None}


def make_drafter(model: Decoder, folder: str) -> Drafter | None:
    """The drafter that the flags ask for."""
    if (FLAGS.draft == "model") != (FLAGS.draft_model is not None):
        raise ValueError("--draft=model and --draft_model=FOLDER go together")
    if FLAGS.draft == "lookup":
        return PromptLookup(FLAGS.drafts)
    if FLAGS.draft == "model":
        return SmallModel(from_pretrained(FLAGS.draft_model, FLAGS.dtype), FLAGS.drafts)
    if FLAGS.draft == "mtp":
        return MultiTokenPrediction(Qwen3_5MTP.from_pretrained(folder, FLAGS.dtype), FLAGS.drafts)
    return None


def end_tokens(folder: str) -> tuple[int, ...]:
    """The tokens that end an answer, by the folder's generation_config.json or config.json; none if neither says."""
    path = pathlib.Path(folder) / "generation_config.json"
    config = read_config(folder)
    for source in (json.loads(path.read_text()) if path.is_file() else {}, config, config.get("text_config")):
        ends = source.get("eos_token_id") if isinstance(source, dict) else None
        if ends is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    return ()


def run(folder: str) -> int:
    """Answers what has no answer yet. Returns how many prompts ended with an error, now or before."""
    defaults = {name: getattr(FLAGS, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    prompts, answers = pathlib.Path(FLAGS.prompts), pathlib.Path(FLAGS.out)
    if answers.exists() and answers.samefile(prompts):
        raise ValueError(f"--out={answers} is the file of the prompts: give another one")
    lines = read_prompts(prompts, {**defaults, "stop_tokens": end_tokens(folder)})
    out, done = open_answers(answers, lines)
    failed = before = sum(error is not None for error in done.values())
    with out:
        left = [line for line in lines if line.id not in done]
        if done:
            errors = f", {before} of them with an error: delete its line to try again" if before else ""
            print(f"{len(done)} of {len(lines)} prompts are answered already{errors}", file=sys.stderr)
        if not left:
            return failed
        model = from_pretrained(folder, FLAGS.dtype)
        tokenizer: Tokenizer | None = None
        if any(isinstance(line.prompt, str) or line.params.stop for line in left):
            tokenizer = load_tokenizer(folder, model.config.vocab_size)
        options: dict[str, Any] = {name: getattr(FLAGS, name) for name in ("max_length", "truncate", "implementation")}
        options["max_stop_tokens"] = max(1, *(len(line.params.stop_tokens) for line in left))
        drafter = make_drafter(model, folder)
        engine = Engine(model, drafter=drafter, tokenizer=tokenizer, num_slots=FLAGS.slots, **options)
        progress, count = Progress(sum(line.params.max_tokens for line in left), sys.stderr.isatty()), 0
        for line, fields in answer(engine, left):
            out.write(json.dumps({"id": line.id, "prompt": line.prompt, **fields}) + "\n")
            out.flush()
            os.fsync(out.fileno())
            failed += "error" in fields
            count += line.params.max_tokens
            progress.update(count)
        progress.close()
    print(f"{len(left)} prompts answered, {failed - before} of them with an error", file=sys.stderr)
    return failed


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        raise app.UsageError("exactly one checkpoint folder is needed")
    try:
        return 1 if run(arguments[1]) else 0
    except (CheckpointError, ModuleNotFoundError, NotImplementedError, OSError, ValueError) as error:
        raise SystemExit(f"replayssm_jax.generate: {error}") from error


if __name__ == "__main__":
    _define_flags()
    app.run(main)
