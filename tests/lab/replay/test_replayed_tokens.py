"""`baton replay --model` computes recorded steps again: the same tokens, and the first other one is named."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.client.timelines import ProcessTimeline, SchedulerCall
from baton.lab.replay.decisions import PlacementCheck
from baton.lab.replay.engine import RecordedModel, check_results
from baton.lab.replay.predict import WhatIf
from baton.lab.replay.record import IncidentRecord, RecordedRequest
from baton.lab.replay.report import ReplayResult, as_text
from baton.lab.replay.steps import ResultDifference, StepCheck
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.router.types.worker import Adapter
from baton.text.structured.output import StructuredKind, StructuredOutput
from tests.fixtures.paged import PagedModel
from tests.lab.replay.incidents import BLOCK_TOKENS, computed_steps_of, placed, record_of, recorded_request, with_tokens

SHARED = tuple(range(100, 108))  # no block of r-0
SAMPLED = 2  # number of the request that is not greedy


@dataclass(frozen=True)
class Recording:
    folder: Path
    worker: ProcessTimeline
    requests: Sequence[RecordedRequest]

    def check(self, *changed: RecordedRequest, folder: Path | None = None) -> StepCheck:
        """Replay the recording, with some requests replaced."""
        by_id = {each.request_id: each for each in (*self.requests, *changed)}
        return computed(record_of(list(by_id.values()), [self.worker]), folder or self.folder)

    def sampling_steps(self, number: int) -> list[int]:
        """Return the numbers of the steps that sampled each token of a request."""
        steps = self.worker.steps
        chunks = [step.number for step in steps if number in step.prompts]  # a last chunk of one token is none
        ends = [step.number for step in steps if number in step.answer_requests]
        answered = self.worker.worker_requests[number].tokens
        return chunks[len(chunks) - (answered - len(ends)) :] + ends


def computed(record: IncidentRecord, folder: Path) -> StepCheck:
    [check] = check_results(record, RecordedModel(folder, dtype="float32")).workers
    return check


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Return requests that overlap, two with a shared prefix, as a real model answered them."""
    folder = tmp_path_factory.mktemp("replayed") / "tiny"
    write_tiny_checkpoint(folder)
    chance = random.Random(0)
    prefix = chance.choices(range(3, 250), k=len(SHARED) * BLOCK_TOKENS)
    asked = [
        (0, recorded_request("r-0", 40, 12), []),
        (1, recorded_request("r-1", 33, 5, SHARED), prefix),
        (3, recorded_request("r-2", 70, 20), []),
        (12, recorded_request("r-3", 34, 6, SHARED), prefix),
    ]
    arrivals = [
        (at, with_tokens(each, prompt + chance.choices(range(3, 250), k=each.prompt_tokens - len(prompt)), hot))
        for (at, each, prompt), hot in zip(asked, (0.0, 0.0, 2.0, 0.0), strict=True)
    ]
    worker, requests = computed_steps_of(arrivals, PagedModel(folder, BLOCK_TOKENS, 400, packed=True).runner.run)
    return Recording(folder, worker, requests)


def test_computed_steps_of_the_same_model_are_as_recorded(recording: Recording) -> None:
    check = recording.check()
    assert (check.difference, check.stopped) == (None, "")
    assert check.checked == check.steps == len(recording.worker.steps) > 20
    assert recording.worker.worker_requests[3].cached_tokens == 32, "the prompt shares a prefix with an earlier one"


def test_computed_steps_with_kv_cached_before_the_record_are_as_recorded(recording: Recording) -> None:
    run = PagedModel(recording.folder, BLOCK_TOKENS, 400, packed=True).runner.run
    worker, requests = computed_steps_of([(0, recording.requests[1]), (6, recording.requests[3])], run)
    second = next(n for n, step in enumerate(worker.steps) if SchedulerCall("add", 1) in step.calls)
    assert worker.worker_requests[1].cached_tokens == 32
    check = computed(record_of(requests, [replace(worker, steps=worker.steps[second:])]), recording.folder)
    assert (check.difference, check.stopped, check.checked) == (None, "", len(worker.steps) - second)


def test_computed_steps_with_another_seed_name_step_request_and_token(recording: Recording) -> None:
    own = recording.requests[SAMPLED]
    assert own.tokens is not None
    other = replace(own, tokens=replace(own.tokens, sampling=replace(own.tokens.sampling, seed=8)))
    difference = recording.check(other).difference
    assert difference is not None and difference.result is not None
    request_id, position, recorded, token = difference.result
    assert request_id == "r-2" and recorded == own.tokens.answers[0][position] != token
    assert difference.step.number == recording.sampling_steps(SAMPLED)[position]


def test_computed_steps_with_a_changed_weight_name_the_first_step_that_samples(
    recording: Recording, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(recording.folder, tmp_path / "changed"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 0.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    difference = recording.check(folder=folder).difference
    assert difference is not None and difference.result is not None
    assert difference.step.number == min(recording.sampling_steps(0)[0], recording.sampling_steps(1)[0])


def test_computed_steps_with_other_log_probabilities_alone_name_the_step(recording: Recording) -> None:
    steps = list(recording.worker.steps)
    steps[14] = replace(steps[14], digest=steps[14].digest ^ 1)
    check = computed(record_of(recording.requests, [replace(recording.worker, steps=tuple(steps))]), recording.folder)
    assert check.difference is not None and check.difference.step.number == 15
    assert check.difference.result == ResultDifference()


STRUCTURED = StructuredOutput(StructuredKind.JSON_SCHEMA, "{}")


def test_computed_steps_stop_at_a_request_without_tokens(recording: Recording) -> None:
    check = recording.check(replace(recording.requests[3], tokens=None))
    assert check.difference is None and 0 < check.checked < check.steps
    assert check.stopped.endswith("r-3 has no recorded tokens")


def test_computed_steps_stop_at_structured_output_and_at_adapters(recording: Recording) -> None:
    own = recording.requests[3]
    assert own.tokens is not None
    structured = replace(own.tokens, sampling=replace(own.tokens.sampling, structured=STRUCTURED))
    assert recording.check(replace(own, tokens=structured)).stopped.endswith("r-3 has structured output")
    [placement] = placed(own, 100).placements
    adapted = replace(placement, request=replace(placement.request, adapter=Adapter("a", "d")))
    assert "with an adapter" in recording.check(replace(own, placements=(adapted,))).stopped


def test_report_names_the_token_and_another_model(recording: Recording) -> None:
    own = recording.requests[1]
    assert own.tokens is not None
    [answer] = own.tokens.answers
    planted = replace(own, tokens=replace(own.tokens, answers=((*answer[:2], answer[2] + 1, *answer[3:]),)))
    record = record_of([planted if each is own else each for each in recording.requests], [recording.worker])
    check = check_results(record, RecordedModel(recording.folder, dtype="float32"))
    text = as_text(ReplayResult(record, PlacementCheck(0, 0, ()), (), {}, (), WhatIf(), (), check))
    assert f"first difference: step {recording.sampling_steps(1)[2]}," in text
    assert f"request r-1, token 2 of the answer: recorded {answer[2] + 1}, computed {answer[2]}" in text
    assert "model: not the recorded one" in text, "the record names no fingerprint"
