"""The benchmarks' figures and plots, without a GPU and without the published kernels."""

import dataclasses
import json
import time

import pytest

from benchmarks import fetch_peers, kernels, peers, peers_timing, plots, readouts, serving, turns
from benchmarks.peers_timing import Call, figures, percentile, window_mean

SHAPES = {"gdn": ([64, 16], [128, 128]), "mamba2": ([128, 8], [64, 128]), "kda": ([32, 32], [128, 128])}


def entry(family="gdn", batch=256, kernel="published_replay", what="step", us=100.0, **more):
    heads, dims = SHAPES[family]
    key = {"family": family, "heads": heads, "dims": dims, "batch": batch, "kernel": kernel, "what": what}
    return key | {"tokens": 1, "records": 0, "flush": False, "us": us, "samples": 20, "spread_us": [us, us]} | more


def window(first=277.0, last=298.0, flush=721.0, records=range(15), **more):
    steps = [entry(us=first + (last - first) * count / 14, records=count, **more) for count in records]
    return [*steps, entry(us=flush, records=15, flush=True, **more)]


def made_up(floor=250.0):
    """Measurements of every kernel that the plots know, in a file's form."""
    entries = []
    for family in SHAPES:
        for batch in (1, 8, 32, 128, 256, 512):
            step = max(4.0, 2 * floor * batch / 256)
            entries.append(entry(family, batch, "recurrent", us=step))
            entries.append(entry(family, batch, "published_replay", "step_mean", us=step / (0.8 + 0.15 * batch**0.3)))
            entries.append(entry(family, batch, "pallas", "step_mean", us=step / (0.95 + 0.17 * batch**0.3)))
        for tokens in (5, 9):
            times = {
                "snapshots": (310 * tokens, 0),
                "published_replay": (200 + 55 * tokens, 650 + 50 * tokens),
                "pallas": (300, 590),
            }
            for kernel, pair in times.items():
                for flush, us in zip((False, True), pair, strict=True):
                    if us:
                        entries.append(entry(family, 256, kernel, "verify", us=us, tokens=tokens, records=8, flush=flush))
    return {"device": "made up", "ceiling": {"read_tb_s": 4.31, "copy_tb_s": 4.28}, "measurements": entries}


def test_percentile_lies_between_neighbours():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.1) == 1.0
    assert percentile([7.0], 0.9) == 7.0


def test_figures_are_median_samples_and_spread():
    assert figures([3.0, 1.0, 2.0]) == {"us": 2.0, "samples": 3, "spread_us": [1.2, 2.8]}
    assert figures([3.0, 1.0, 2.0], "kernel_us") == {"kernel_us": 2.0}


def test_window_mean_is_fifteen_ordinary_steps_and_one_flush():
    mean = window_mean(window(kernel_us=200.0))
    assert mean["us"] == pytest.approx((15 * 287.5 + 721) / 16, abs=1e-3)
    assert (mean["what"], mean["window"], mean["kernel_us"], mean["samples"]) == ("step_mean", 16, 200.0, 320)
    assert "records" not in mean
    assert "flush" not in mean


def test_window_mean_interpolates_records_that_were_not_measured():
    assert window_mean(window(records=(0, 7, 14)))["us"] == pytest.approx(window_mean(window())["us"], abs=1e-3)


@pytest.mark.parametrize("records", [(1, 14), (0, 7)])
def test_window_mean_needs_both_ends(records):
    assert window_mean(window(records=records)) is None


def test_window_mean_needs_a_flush_that_ran():
    failed = entry(flush=True, records=15, error="broken")
    del failed["us"]
    assert window_mean([*window()[:-1], failed]) is None


def test_entries_have_the_files_form():
    call = Call("published_replay", "verify", lambda: None, tokens=5, records=8, flush=True, variant="exact")
    expected = {"family": "gdn", "heads": [64, 16], "dims": [128, 128], "batch": 256, "kernel": "published_replay"}
    expected |= {"what": "verify", "tokens": 5, "records": 8, "flush": True, "variant": "exact"}
    assert call.entry("gdn", (64, 16), (128, 128), 256) == expected


def test_a_failing_call_stops_no_other(monkeypatch):
    def times(run, samples):
        run()
        return [1.0] * samples

    def broken():
        raise ValueError("wrong stride")

    monkeypatch.setattr(peers_timing, "graph_times", times)
    monkeypatch.setattr(peers_timing, "kernel_times", lambda runs: [[0.5] * 3 for _ in runs])
    calls = [
        Call("recurrent", "step", broken),
        Call("recurrent", "step", int),
        Call("snapshots", "verify", broken, error="none"),
    ]
    entries = peers_timing.measure(calls, [{}, {}, {}], samples=4)
    assert entries[0] == {"error": "ValueError: wrong stride"}
    assert (entries[1]["us"], entries[1]["kernel_us"], entries[1]["samples"]) == (1.0, 0.5, 4)
    assert entries[2] == {"error": "none"}


def test_plan_puts_headlines_first_and_gives_other_shapes_steps_only():
    jobs = peers.plan(["gdn", "kda"], (8, 256), peers.PARTS)
    assert [str(job) for job in jobs[:2]] == ["gdn 64/16 heads, batch 8, step", "gdn 64/16 heads, batch 8, verify"]
    others = [job for job in jobs if job.heads not in ((64, 16), (32, 32))]
    assert {job.part for job in others} == {"step"}
    assert {job.heads for job in others} == {(32, 16), (64, 64), (96, 96)}
    assert jobs[-len(others) :] == others
    assert {job.heads for job in peers.plan(["kda"], (8,), peers.PARTS, quick=True)} == {(32, 32)}
    assert (len(peers.records_of(jobs[0])), len(peers.records_of(jobs[0], quick=True)), len(peers.records_of(others[0]))) == (
        15,
        3,
        3,
    )


def test_command_line_refuses_unknown_families(capsys):
    with pytest.raises(SystemExit):
        peers.parse(["--families=rwkv"])
    assert "families are gdn, mamba2, kda" in capsys.readouterr().err
    assert peers.parse(["--batches=1,8"]).batches == (1, 8)


def test_stubs_are_python_and_every_folder_is_a_package(tmp_path):
    fetch_peers.write_stubs(tmp_path)
    for path in tmp_path.rglob("*.py"):
        compile(path.read_text(), path, "exec")
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert folders
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_speedup_takes_kernel_time_and_the_faster_of_two_variants():
    entries = [entry(kernel="recurrent", us=9.0, kernel_us=6.0)]
    entries += [entry(what="step_mean", us=us, variant=variant) for us, variant in ((3.0, "a"), (2.0, "b"))]
    assert plots.speedups(entries, "gdn", "published_replay") == [(256, 3.0)]


def test_floor_is_one_read_of_all_checkpoints():
    assert plots.floor_us(made_up(), "gdn") == pytest.approx(256 * (4 << 20) / 4.31e12 * 1e6)
    assert plots.floor_us({"measurements": []}, "gdn") is None


def test_the_headline_verifies_are_those_of_the_default_policy():
    """Drafts of a channel gate are recorded raw: their times come from readouts.py, in place of those with updates."""
    from replayssm_jax import Recurrence, ReplayPolicy, init_state

    entries = [entry(family, 256, "pallas", "verify", us=300.0, tokens=5, records=6) for family in ("gdn", "kda")]
    raw = [entry(family, 256, "pallas", "verify", us=200.0, tokens=5, readout="raw") for family in ("gdn", "kda")]
    raw.append(entry("kda", 256, "pallas", "step", readout="raw"))
    chosen = plots.with_raw_records({"measurements": entries}, {"measurements": raw})["measurements"]
    assert {e["family"]: e["us"] for e in chosen} == {"gdn": 300.0, "kda": 200.0}
    for family, (delta_rule, channel_gate) in kernels.RECURRENCES.items():
        gate = "channel" if channel_gate else "head"
        layer = Recurrence(num_value_heads=2, num_key_heads=1, key_dim=64, value_dim=64, delta_rule=delta_rule, gate=gate)
        ring = init_state(layer, ReplayPolicy(max_draft=5, window=16, record_dtype="bfloat16"), num_slots=1).buffer
        raw_by_default = delta_rule and ring.weight is not None
        assert raw_by_default == (family in plots.RAW_BY_DEFAULT)


def test_plots_are_small_pictures_of_what_was_measured(tmp_path):
    source = tmp_path / "kernels.json"
    source.write_text(json.dumps(made_up()))
    paths = plots.draw(source, tmp_path)
    assert [path.name for path in paths] == ["speedup_h200.svg", "verify_h200.svg"]
    assert all(10_000 < path.stat().st_size < 200_000 for path in paths)


def test_the_plot_of_readouts_names_what_was_read():
    steps = [entry(readout=form, records=n, us=us) for form, us in (("checkpoint", 280.0), ("nvfp4", 90.0)) for n in (1, 14)]
    panel = plots.draw_readouts({"measurements": [*steps, entry(readout="nvfp4", records=15, flush=True, us=1e3)]}).axes[0]
    assert [text.get_text() for text in panel.texts] == ["90  NVFP4 copy", "280  float32 checkpoint"]


@dataclasses.dataclass(frozen=True)
class Job:
    family: str
    us: float


def compile_job(job):
    if job.us < 0:
        raise ValueError("does not compile")
    return 2 * job.us


def measure_job(job, program):
    return [{"family": job.family, "us": program}], f"{program} us"


def test_jobs_of_several_processes_are_all_measured_and_failures_named(capfd):
    jobs = [Job("gdn", 1.0), Job("kda", -1.0), Job("mamba2", 3.0)]
    found = turns.measure_all(jobs, compile_job, measure_job, processes=2)
    assert sorted(entry["us"] for entry in found if "us" in entry) == [2.0, 6.0]
    (failure,) = (entry for entry in found if "error" in entry)
    assert failure["family"] == "kda"
    assert "does not compile" in failure["error"]
    assert "Job(family='gdn', us=1.0): 2.0 us" in capfd.readouterr().out


@dataclasses.dataclass(frozen=True)
class Stamped(Job):
    """Compiles in as many seconds, and says when it was compiled and when measured."""


def compile_stamped(job):
    time.sleep(job.us)
    return time.monotonic()


def measure_stamped(job, program):
    return [{"family": job.family, "compiled": program, "measured": time.monotonic()}], "done"


def test_jobs_apart_are_measured_when_all_are_compiled():
    found = turns.measure_all([Stamped("gdn", 0.0), Stamped("kda", 0.5)], compile_stamped, measure_stamped, 2, apart=True)
    assert max(entry["compiled"] for entry in found) < min(entry["measured"] for entry in found)


@pytest.mark.long
def test_serving_gives_the_same_answers_with_drafts_in_fewer_rounds():
    plain, drafted = (serving.Subject(serving.Job("demo", "xla", drafts, slots=2, count=3)) for drafts in (0, serving.DRAFTS))
    assert plain.serve()["answers_sha256"] == drafted.serve()["answers_sha256"]
    assert plain.rounds()["tokens_per_round"] == 1
    assert drafted.rounds()["tokens_per_round"] > 1.5
    with pytest.raises(RuntimeError, match="a slot is full"):
        list(iter(drafted.rounds, None))


def test_time_per_call_leaves_out_what_runs_once():
    events = [("replay_read", float(i), 80.0) for i in range(readouts.LOOP)] + [("copy", 0.0, 500.0)]
    assert readouts.per_call([*events, *(("add", 0.0, 1.5) for _ in range(2 * readouts.LOOP))]) == {
        "replay_read": 80.0,
        "add": 3.0,
    }


@pytest.mark.parametrize("draw", [plots.draw_speedup, plots.draw_verify])
def test_plots_name_every_curve_in_every_panel(draw):
    for panel in draw(made_up()).axes:
        names = " ".join(text.get_text() for text in panel.texts)
        assert "this package" in names
        assert "published replay" in names


def test_plots_of_a_part_of_the_measurements(tmp_path):
    source = tmp_path / "kernels.json"
    source.write_text(json.dumps({"measurements": [entry("kda", kernel="recurrent"), {"family": "gdn", "error": "broken"}]}))
    assert len(plots.draw(source, tmp_path)) == 2
