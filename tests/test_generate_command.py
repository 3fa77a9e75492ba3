"""``python -m replayssm_jax.generate``: what it reads and writes, and that a crash loses and doubles nothing."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from replayssm_jax import generate as command
from replayssm_jax.decoding import SamplingParams
from tests.decoding_runs import solo

ROOT = pathlib.Path(__file__).parent.parent
DEFAULTS = {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 5, "stop_tokens": ()}


def write(path: pathlib.Path, *lines) -> pathlib.Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def start(prompts: pathlib.Path, out: pathlib.Path) -> subprocess.Popen:
    quick = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    flags = [f"--prompts={prompts}", f"--out={out}", "--slots=2", "--max_length=128", "--draft=lookup", "--drafts=3"]
    call = [sys.executable, "-m", "replayssm_jax.generate", "tests/goldens/qwen3_5", *flags]
    return subprocess.Popen(call, cwd=ROOT, env={**os.environ, **quick}, stderr=subprocess.PIPE, text=True)


def answers(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_a_crash_loses_and_doubles_nothing(tmp_path):
    """Killed when some answers are there, one of them cut short; run again it gives what solo runs give."""
    lines = [{"id": f"q{i}", "prompt": "And the LORD said "[: 3 + i], "max_tokens": 6 + 9 * i} for i in range(12)]
    lines[3] = {"id": "bad", "tokens": [999]}
    prompts, out = write(tmp_path / "prompts.jsonl", *lines), tmp_path / "out.jsonl"
    with start(prompts, out) as broken:
        while (not out.exists() or out.read_text().count("\n") < 4) and broken.poll() is None:
            time.sleep(0.01)
        broken.send_signal(signal.SIGKILL)
    before = out.read_text()
    assert 4 <= before.count("\n") < 12
    before = before[: before.rindex("\n") + 1]
    out.write_text(before + '{"id": "q11", "prompt": "And the L')
    with start(prompts, out) as again:
        said = again.communicate()[1]
    assert again.returncode == 1, said  # one prompt is bad
    assert "answered already" in said
    assert out.read_text().startswith(before)
    assert sorted(answer["id"] for answer in answers(out)) == sorted(line["id"] for line in lines)
    for line in lines:
        answer = next(answer for answer in answers(out) if answer["id"] == line["id"])
        if line["id"] == "bad":
            assert "999" in answer["error"]
        else:
            assert tuple(answer["tokens"]) == solo(tuple(line["prompt"].encode()), line["max_tokens"])


def test_lines_say_what_differs_from_the_flags(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "a"},
        "\n",
        {"tokens": [1, 2], "id": "x", "temperature": 0.5, "stop": ["b"], "max_tokens": 3},
    )
    first, second = command.read_prompts(path, DEFAULTS)
    assert (first.id, first.prompt, first.params) == (1, "a", SamplingParams(max_tokens=8, seed=5))
    assert (second.id, second.prompt) == ("x", [1, 2])
    assert second.params == SamplingParams(max_tokens=3, temperature=0.5, stop=("b",), seed=7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"\n', "p.jsonl:2"),
        ({"prompt": "a", "tokens": [1]}, '"prompt" or "tokens"'),
        ({"id": 3}, '"prompt" or "tokens"'),
        ({"prompt": 3}, "must be text, got 3"),
        ({"prompt": "a", "temprature": 1}, "unknown fields temprature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": 10**400}, "p.jsonl:2: temperature"),
        ({"prompt": "a", "id": 1}, "id 1 is line 1's already"),
        ({"prompt": "a", "id": True}, "id must be text"),
        ("[1]\n", "an object"),
        ("[" * 100_000 + "\n", "p.jsonl:2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        command.read_prompts(write(tmp_path / "p.jsonl", {"prompt": "first"}, line), DEFAULTS)


def test_no_prompts_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no prompts"):
        command.read_prompts(write(tmp_path / "p.jsonl", "\n"), DEFAULTS)


def test_a_prompt_may_hold_any_line_separator(tmp_path):
    text = "a\N{LINE SEPARATOR}b\N{PARAGRAPH SEPARATOR}c\N{NEXT LINE}d"
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + '\r\n{"prompt": "e"}', encoding="utf-8")
    assert [line.prompt for line in command.read_prompts(path, DEFAULTS)] == [text, "e"]


def test_prompts_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl is not UTF-8"):
        command.read_prompts(tmp_path / "p.jsonl", DEFAULTS)


def test_a_file_that_holds_something_else_is_left_as_it_is(tmp_path):
    lines = command.read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}), DEFAULTS)
    for content, message in (
        ("my notes\n", "is no answer"),
        ("my notes", "last line of .* is no answer"),
        ('{"id": 1, "name": "a"}', "last line of .* is no answer"),
        ('{"id": 1, "prompt": "a", "label": "x"}', "last line of .* is no answer"),
        ('{"id": 1, "prompt": "a"}\n', "is no answer"),  # a line of prompts
        ('{"id": [1], "prompt": "a", "tokens": []}\n', "is no answer"),
        ('{"id": true, "prompt": "a", "tokens": []}\n', "is no answer"),
        ("[" * 100_000 + "\n", "is no answer"),
        ('{"id": 9, "prompt": "a", "tokens": []}\n{"id"', "answers id 9"),
        ('{"id": 1, "prompt": "other", "error": "e"}\n', "answers id 1"),
    ):
        path = write(tmp_path / "out.jsonl", content)
        with pytest.raises(ValueError, match=message):
            command.open_answers(path, lines)
        assert path.read_text() == content


@pytest.mark.parametrize("cut", ["", '{"i', '{"id": 2, "prompt": "b", "text": "x', '{"id": 2, "prompt": "b", "err'])
def test_a_line_cut_short_is_cut_off(tmp_path, cut):
    lines = command.read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}), DEFAULTS)
    whole = '{"id": 1, "prompt": "a", "text": "c", "tokens": [99]}\n'
    out, done = command.open_answers(write(tmp_path / "out.jsonl", whole + cut), lines)
    out.close()
    assert done == {1: None}
    assert (tmp_path / "out.jsonl").read_text() == whole


def flags(monkeypatch, folder: pathlib.Path, **others) -> None:
    given = {"prompts": str(folder / "p.jsonl"), "out": str(folder / "out.jsonl"), **DEFAULTS, **others}
    monkeypatch.setattr(command, "FLAGS", types.SimpleNamespace(**given))


def test_errors_are_answers_and_the_exit_code_remembers_them(tmp_path, monkeypatch, capsys):
    write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    write(tmp_path / "out.jsonl", {"id": 2, "prompt": "b", "error": "e"}, {"id": 1, "prompt": "a", "tokens": [1]})
    flags(monkeypatch, tmp_path)
    assert command.run("tests/goldens/qwen3_5") == 1
    assert "2 of 2 prompts are answered already, 1 of them with an error: delete its line" in capsys.readouterr().err


def test_the_prompts_are_no_place_for_the_answers(tmp_path, monkeypatch):
    path = write(tmp_path / "p.jsonl", {"id": 1, "prompt": "a"})
    (tmp_path / "out.jsonl").symlink_to(path)
    before = path.read_text()
    flags(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r"--out=.* is the file of the prompts"):
        command.run("tests/goldens/qwen3_5")
    assert path.read_text() == before


def test_a_flag_out_of_range_is_not_blamed_on_a_line(tmp_path, monkeypatch):
    write(tmp_path / "p.jsonl", {"prompt": "a"})
    flags(monkeypatch, tmp_path, top_p=0.0)
    with pytest.raises(ValueError, match=r"^--top_p must be in"):
        command.run("tests/goldens/qwen3_5")


def test_two_processes_do_not_write_one_file(tmp_path):
    lines = command.read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a"}), DEFAULTS)
    out, done = command.open_answers(tmp_path / "out.jsonl", lines)
    with out, pytest.raises(ValueError, match="another process"):
        command.open_answers(tmp_path / "out.jsonl", lines)
    assert done == {}


def test_end_tokens_are_the_folders(tmp_path):
    write(tmp_path / "config.json", {"eos_token_id": 7})
    assert command.end_tokens(str(tmp_path)) == (7,)
    write(tmp_path / "generation_config.json", {"eos_token_id": [8, 9]})
    assert command.end_tokens(str(tmp_path)) == (8, 9)
    (tmp_path / "generation_config.json").unlink()
    write(tmp_path / "config.json", {"text_config": {"eos_token_id": 3}})
    assert command.end_tokens(str(tmp_path)) == (3,)
    write(tmp_path / "generation_config.json", {"eos_token_id": None})
    write(tmp_path / "config.json", {"eos_token_id": None, "text_config": {"eos_token_id": [4]}})
    assert command.end_tokens(str(tmp_path)) == (4,)
