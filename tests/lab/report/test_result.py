"""Results of benchmarks: what a result file says of its origin, and how rounds are judged."""

import json
import sys
from pathlib import Path

import pytest

from baton.lab.benchmarks.isolation.figures import Figures, Objectives, Report, TimeSpread, as_json
from baton.lab.benchmarks.isolation.load import LoadPhase, PhaseLoad
from baton.lab.report.result import Promise, judge_rounds, make_result, write_result
from baton.launch.paths import ROOT


def test_result_names_its_origin_and_keeps_all_rounds(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, make_result(["engine"], [{"ms": 3.0}, {"ms": 1.0}], Promise("fast", 1, 1), model="m"))
    found = json.loads(path.read_text())
    assert found["rounds"] == [{"ms": 3.0}, {"ms": 1.0}]
    assert found["verdict"] == {"text": "fast", "held": 1, "missed": 1}
    assert found["measures"] == ["engine"] and found["model"] == "m"
    assert {"date", "cpu", "cores"} <= found["machine"].keys()
    assert {"commit", "changed", "command"} <= found.keys()


def test_command_of_a_result_names_no_folder_outside_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", str(ROOT / "models" / "tableqa"), "--vllm-python=/home/someone/bin/python", "--rounds", "5"]
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    command = make_result([], [], None)["command"]
    assert command.endswith("--model models/tableqa --vllm-python=python --rounds 5")


def test_rounds_that_missed_a_promise_are_counted() -> None:
    assert judge_rounds("p", [True, False, False]) == Promise("p", 1, 2)


def of_phase(p99_ms: float, tokens_per_s: float) -> Figures:
    tbt = TimeSpread(10.0, p99_ms, p99_ms, p99_ms)
    return Figures(tbt, None, None, None, tokens_per_s, tokens_per_s, 0.0, 0.0, None, None)


def test_each_round_of_isolation_is_judged_by_itself() -> None:
    quiet = [of_phase(20.0, 100.0)] * 3
    saturated = [of_phase(22.0, 96.0), of_phase(30.0, 96.0), of_phase(20.0, 90.0)]
    rounds = {"1p1d": {LoadPhase.QUIET: quiet, LoadPhase.SATURATED: saturated}}
    load = PhaseLoad(5.0, 4, 64, 256, 1024, 1.0, 3)
    found = as_json(Report("m", "none", (0, 1), load, Objectives(2000.0, 50.0), rounds))
    assert (found["verdict"]["held"], found["verdict"]["missed"]) == (1, 2)
    assert [each["1p1d"]["saturated"]["tbt"]["p99"] for each in found["rounds"]] == [22.0, 30.0, 20.0]
    assert found["verdicts"]["1p1d"]["client"]["holds"] is True, "medians over the rounds"
