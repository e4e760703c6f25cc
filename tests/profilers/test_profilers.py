"""Profilers add to rows, and can do nothing else to them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from minfer import ops, profilers
from minfer.rows import store
from minfer.rows.writer import Writer
from minfer.worker import shard as shards
from tests.conftest import FAULTS, ROOT, has_gpu, launch

PROFILERS = ROOT / "tests" / "faults" / "profilers.py"


def found(
    name: str, folder: Path, statuses: tuple[str, ...] = ("ok", "ok", "ok"), timeout_s: float = 60
) -> list[store.Row]:
    """What a profiler's run adds to the rows of some cases."""
    op = ops.get("hgemm")
    rows = [
        (op.case("torch", "float16", dict.fromkeys(op.axes, 8 * index)), status)
        for index, status in enumerate(statuses, 1)
    ]
    setting = profilers.Setting("cpu", [str(PROFILERS)], folder, folder / "log", timeout_s, timeout_s)
    pairs = list(profilers.run(name, {}, rows, setting))
    assert [case.key for case, _ in pairs] == [case.key for case, _ in rows]  # each once, whatever happens
    return [columns for _, columns in pairs]


def whys(columns: list[store.Row], name: str) -> list[str]:
    assert all(list(column["profilers"]) == [name] for column in columns)
    return [column["profilers"][name] for column in columns]


def test_what_is_found_has_the_profilers_name_before_it(tmp_path):
    first, second, _ = found("good", tmp_path)
    assert first["metrics"] == {"good.index": 0.0, "good.m": 8.0} and second["metrics"]["good.m"] == 16.0
    assert first["functions"] == {"good.scope": "f"} and first["profilers"] == {"good": "ok"}


def test_a_profiler_that_dies_again_and_again_is_given_up(tmp_path):
    columns = found("exits", tmp_path, ("ok",) * 8)
    assert all("exit status 3" in why for why in whys(columns, "exits"))
    assert (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "RuntimeError: counters are not"), ("stops_early", "StopIteration")]
)
def test_a_death_costs_one_case_and_the_rest_goes_on(tmp_path, name, words):
    columns = found(name, tmp_path)
    first, second, third = whys(columns, name)
    assert (first, third) == ("ok", "ok") and "the process died in the phase 'profile'" in second and words in second
    assert columns[1]["metrics"] == {} and columns[2]["metrics"][f"{name}.m"] == 24


def test_a_profiler_that_hangs_is_killed_and_the_rest_goes_on(tmp_path):
    first, second, third = whys(found("hangs", tmp_path, timeout_s=3), "hangs")
    assert first == third == "ok" and second == "killed after 3 s, in the phase 'profile'"


def test_an_answer_that_is_no_finding_is_not_kept(tmp_path):
    columns = found("answers_nonsense", tmp_path)
    assert columns[2]["metrics"] == {"answers_nonsense.speed": 1.0}
    first, second, third = whys(columns, "answers_nonsense")
    assert first == second == "its answer is no finding: numbers, names and a sentence" and third == "ok"
    assert columns[0]["metrics"] == columns[1]["metrics"] == {}


def test_who_writes_to_the_pipe_is_not_believed(tmp_path):
    columns = found("writes_to_the_pipe", tmp_path)
    assert all(column["metrics"] == {} for column in columns)
    assert all("result pipe" in why for why in whys(columns, "writes_to_the_pipe"))


def test_what_was_not_measured_is_kept_from_a_profiler_that_runs_kernels(tmp_path):
    columns = found("prints", tmp_path, ("crashed", "ok", "unconverged"))
    assert whys(columns, "prints") == ["the case was not measured", "ok", "ok"]
    assert [column["metrics"].get("prints.index") for column in columns] == [None, 0.0, 1.0]
    assert "{}" in (tmp_path / "log").read_text()  # and what it prints disturbs nothing
    assert whys(found("good", tmp_path, ("crashed", "ok")), "good") == ["ok", "ok"]


def test_an_unknown_profiler_has_its_reason_in_the_rows(tmp_path):
    assert all(
        "No module named 'minfer.profilers.gone'" in why for why in whys(found("gone", tmp_path, ("ok",)), "gone")
    )


# In a shard


def test_a_shards_times_are_written_before_and_not_changed_by_its_profilers(run_shard, monkeypatch):
    before: list[store.Row] = []
    profile = shards.profile

    def watched(shard: Any, setting: Any, statuses: Any, writer: Writer, tell: Any) -> None:
        before.extend(store.rows(writer.parts))
        profile(shard, setting, statuses, writer, tell)

    monkeypatch.setattr(shards, "profile", watched)
    extra = [str(FAULTS), str(PROFILERS)]
    chosen: dict[str, Any] = {"raises": {}, "good": {}, "hangs": {}}
    after = run_shard(["honest", "zeros"], profilers=chosen, extra=extra, build_timeout_s=1.0, case_timeout_s=19.0)
    assert [row["kernel"] for row in before] == ["honest", "zeros"] == [row["kernel"] for row in after]
    assert before[0]["status"] in store.MEASURED and before[0]["cold_us"] > 0
    for old, new in zip(before, after, strict=True):
        changed = {name for name in store.SCHEMA.names if old[name] != new[name]}
        assert changed == {"metrics", "functions", "profilers"}
    honest, zeros = after
    assert honest["metrics"] == {"raises.index": 0, "raises.m": 64, "good.index": 0, "good.m": 64} | {
        "hangs.index": 0,
        "hangs.m": 64,
    }
    assert honest["profilers"] == {"raises": "ok", "good": "ok", "hangs": "ok"}
    assert zeros["metrics"] == {"good.index": 1, "good.m": 64} and zeros["profilers"]["good"] == "ok"
    assert zeros["profilers"]["raises"] == zeros["profilers"]["hangs"] == "the case was not measured"


def test_a_shard_that_runs_again_profiles_what_it_has_timed(run_shard):
    extra = [str(FAULTS), str(PROFILERS)]
    (timed,) = run_shard(["honest"], extra=extra)
    for _ in range(2):
        (row,) = run_shard(["honest"], extra=extra, profilers={"good": {}})
        assert row["profilers"] == {"good": "ok"} and row["cold_samples_us"] == timed["cold_samples_us"]


@pytest.mark.slow
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_static_reads_the_cuda_kernels_and_times_none(tmp_path):
    words = ["+sweep=hgemm", "cluster=local", "shape=tiny", "timing=quick", "dtype=float16", "profiler=static"]
    words += ["kernel=[v01_naive,v02_tiled]", "profiler.static.archs=[sm_89]"]
    done = launch(*words, f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(store.rows(store.files(tmp_path / "results")))
    assert [(row["kernel"], row["status"], row["message"]) for row in rows] == [
        ("v01_naive", "unsupported", "needs a CUDA GPU"),
        ("v02_tiled", "unsupported", "needs a CUDA GPU"),
    ]
    for row in rows:
        assert row["profilers"] == {"static": "ok"} and row["metrics"]["static.sm_89.registers"] > 0
        assert row["cold_us"] is None and "<__half>" in row["functions"]["static.sm_89"]
    assert "Machine code, by profiler=static" in done.stdout and "tiled<__half>" in done.stdout
    events = [json.loads(line) for path in tmp_path.glob("runs/*/progress/*.jsonl") for line in path.open()]
    assert [event["event"] for event in events if "profiler" in event] == ["profiler", "profiled", "profiled"]


def test_no_process_is_left_when_the_reader_stops(tmp_path):
    op = ops.get("hgemm")
    rows = [(op.case("torch", "float16", dict.fromkeys(op.axes, size)), "ok") for size in (8, 16)]
    setting = profilers.Setting("cpu", [str(PROFILERS)], tmp_path, tmp_path / "log", 60, 60)
    run = profilers.run("hangs", {}, rows, setting)
    next(run)
    host = next(p for p in profilers.Process.__init__.__globals__["running"])
    run.close()
    with pytest.raises(ProcessLookupError):
        os.kill(host, 0)
