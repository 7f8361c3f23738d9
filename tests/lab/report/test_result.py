"""Results of benchmarks: what a result file says of its origin, and how rounds are judged."""

import json
import sys
from pathlib import Path

import pytest

from baton.lab.report.result import Promise, judge_rounds, make_result, write_result
from baton.launch.paths import ROOT


def test_result_names_its_origin_and_keeps_all_rounds(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, make_result(["engine"], [{"ms": 3.0}, {"ms": 1.0}], Promise("fast", 1, 1), model="m"))
    found = json.loads(path.read_text())
    assert found["rounds"] == [{"ms": 3.0}, {"ms": 1.0}]
    assert found["verdict"] == {"text": "fast", "held": 1, "missed": 1, "of": "rounds"}
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
