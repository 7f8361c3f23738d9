"""docs/changing.md: its edits fit the code as it is, and what they make works, in a scratch copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_import_rules import ALLOWED

ROOT = Path(__file__).parents[1]
MAX_FILES = {"A sampling parameter": 7, "A placement policy": 4, "A model family": 2}

SAMPLING = """
import asyncio
from dataclasses import replace
import torch
from baton.client.requests import generate_request
from baton.engine.sampling.logits import filtered
from baton.router.http.messages import CompletionRequest
from baton.router.http.requests import HttpCall, completion_requests
from baton.router.fleet.wire import sampling_message
from baton.router.model.defaults import GenerationDefaults
from baton.router.model.validation import DrawnValues, validate
from baton.router.public.access import Caller
from baton.router.public.service import generate_request as asked
from baton.process.errors import InvalidArgument
from baton.worker.wire import sampling_params

def resolved(request):
    return validate(request, GenerationDefaults(), 8, 64, DrawnValues("r", 1)).sampling

over_grpc = resolved(asked(generate_request("a", {"temperature": 1.0, "epsilon_cutoff": 0.25})))
[message] = completion_requests(CompletionRequest(prompt="a", epsilon_cutoff=0.25), HttpCall("", Caller(), "", None))
assert over_grpc.epsilon_cutoff == resolved(message).epsilon_cutoff == 0.25
params = sampling_params(sampling_message(over_grpc, True))
kept = filtered(torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None], [params]).cumulative[0].diff() > 0
assert kept.tolist() == [True, False, False], kept
assert not params.filters_by_rank_alone
both = replace(params, typical_p=0.5, epsilon_cutoff=0.2)  # typical_p excludes the likeliest token
assert filtered(torch.tensor([0.25, *[0.05] * 15]).log()[None], [both]).cumulative[0, -1] > 0
try:
    resolved(asked(generate_request("a", {"epsilon_cutoff": 1.5})))
except InvalidArgument as error:
    assert str(error) == "sampling.epsilon_cutoff: must be a number from 0 to 1, not 1.5", error
else:
    raise AssertionError("1.5 was not refused")
"""

PLACEMENT = """
from dataclasses import replace
from baton.router.placement.policies import Strategy
from tests.fixtures.router_defaults import make_policy
from tests.router.test_policies import DECODE, REQUEST

busy, free = replace(DECODE, used_slots=3), replace(DECODE, endpoint="d1", used_slots=1)
policy = make_policy(strategy=Strategy("least_answers")).weighing
assert policy.decode_costs(REQUEST, [busy, free], None).totals == [3, 1]
"""


def edits(title: str) -> list[tuple[str, str]]:
    """(file, hunk) for each edit of one part of the page; a block is for each of the files named before it, in turn."""
    page = (ROOT / "docs" / "changing.md").read_text()
    [part] = [part for part in page.split("\n## ")[1:] if part.startswith(title)]
    found, files = [], list[str]()
    for line_or_block in re.findall(r"^```diff\n.*?^```|^`[^\n]*", part, flags=re.M | re.S):
        if line_or_block.startswith("```diff"):
            hunks = line_or_block.removeprefix("```diff\n").removesuffix("```").split("@@\n")
            found += [(files[0], hunk) for hunk in hunks]
            files = files[1:]
        else:
            files += re.findall(r"`([\w/]+\.(?:py|proto))`", line_or_block)
    return found


def apply(copy: Path, file: str, hunk: str) -> None:
    """Fails where the lines that the edit is about are not in the file, or any but those of one place."""
    lines = hunk.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    path = copy / file
    source = path.read_text()
    assert before in source, f"docs/changing.md: {file} does not have\n{before}"
    path.write_text(source.replace(before, after))


def scratch_copy(folder: Path) -> Path:
    for name in [*ALLOWED, "src", "tests"]:
        shutil.copytree(
            ROOT / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("node_modules", "results", "quantized", "*.egg-info"),
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    for kept in (".cache", ".hypothesis"):  # the generator of the protos, and what is known of the sources' constants
        (ROOT / kept).mkdir(exist_ok=True)
        (folder / kept).symlink_to(ROOT / kept)
    return folder


def run(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def changed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the code with the edits of the part that the test is for."""
    title = request.param
    copy, files = scratch_copy(tmp_path), set()
    for file, hunk in edits(title):
        apply(copy, file, hunk)
        files.add(file)
    assert 0 < len(files) <= MAX_FILES[title], files
    return copy


@pytest.mark.parametrize("changed", ["A sampling parameter"], indirect=True)
def test_walkthrough_sampling_parameter_reaches_the_sampler(changed: Path) -> None:
    run(changed, "protos/generate.py")
    run(changed, "-c", SAMPLING)
    for command in ("generate", "chat"):
        assert "--epsilon-cutoff" in run(changed, "-m", "baton.cli", command, "--help")


@pytest.mark.parametrize("changed", ["A placement policy"], indirect=True)
def test_walkthrough_placement_policy_is_chosen_by_name(changed: Path) -> None:
    run(changed, "-c", PLACEMENT)
    run(changed, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/router/test_policies.py")
    assert "least_answers" in run(changed, "-m", "baton.cli", "up", "--help")


@pytest.mark.parametrize("changed", ["A model family"], indirect=True)
def test_walkthrough_model_family_equals_transformers(changed: Path) -> None:
    ran = run(
        changed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine/test_exactness.py", "-k", "iquestcoder"
    )
    assert re.search(r"[1-9]\d* passed", ran), ran
