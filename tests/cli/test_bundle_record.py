"""record.json of a bundle: what decided about requests, without names of blocks, and never larger than allowed."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from baton.cli.bundle.command import safe_texts
from baton.cli.bundle.decided import FixedNames, decided_record
from baton.cli.bundle.redaction import REDACTED, Redactor
from baton.client.timelines import ProcessTimeline, RoutedRequest, RoutedStall, TimelineStep

STALL = RoutedStall(3, 30.0, {"prompt tokens by other": 3.0})


def request(request_id: str, *blocks: int, **decided: Any) -> RoutedRequest:
    names = "".join(f"{block:016x}" for block in blocks)
    return RoutedRequest(request_id, "t", "chat tiny", "", 1, 2, (), (STALL,), json.dumps({"blocks": names, **decided}))


def router(*requests: RoutedRequest) -> ProcessTimeline:
    return ProcessTimeline("router", "router", "", 0, "", requests=requests, decided='{"policy":{}}')


def worker(steps: int = 1, failure: str = "") -> ProcessTimeline:
    made = tuple(
        TimelineStep(n + 1, n, n + 1, 1, 5, {3: 7}, (4,), 0, 0, 0, 0, 0, {"idle": 1.0}, digest=99) for n in range(steps)
    )
    return ProcessTimeline("decode-0", "decode", "d:1", 0, failure, steps=made)


def processes(*routers: Sequence[ProcessTimeline], most_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = decided_record(routers, most_bytes)["processes"]
    return found


def test_record_numbers_blocks_by_first_appearance_over_all_routers() -> None:
    one, two = processes([router(request("a", 0xAB, 0xCD))], [router(request("b", 0xAB, 0xEF))])
    assert one["requests"][0]["decided"]["blocks"] == [0, 1]
    assert two["requests"][0]["decided"]["blocks"] == [0, 2]
    assert f"{0xAB:016x}" not in json.dumps([one, two])


def test_record_has_each_worker_once_and_prefers_one_that_answered() -> None:
    found = processes([router(), worker(failure="UNAVAILABLE")], [router(), worker(2)])
    assert [each["name"] for each in found] == ["router", "decode-0", "router"]
    assert len(found[1]["steps"]) == 2


def test_record_over_the_limit_keeps_the_newest_steps() -> None:
    whole = json.dumps(decided_record([[router(), worker(100)]], 1 << 20), separators=(",", ":"))
    [_, cut] = processes([router(), worker(100)], most_bytes=len(whole) - 1)
    assert [step["number"] for step in cut["steps"]] == list(range(51, 101))


@pytest.mark.parametrize("with_tokens", [False, True])
def test_record_has_digests_of_steps_only_with_tokens(with_tokens: bool) -> None:
    [_, found] = decided_record([[router(), worker()]], 1 << 20, with_tokens)["processes"]
    assert found["steps"][0].get("digest") == (99 if with_tokens else None)


def test_record_has_no_stalls_whose_texts_name_other_requests() -> None:
    assert "other" not in json.dumps(processes([router(request("a"))]))


def test_record_keeps_names_of_fields_that_look_secret_and_redacts_values() -> None:
    text = FixedNames({"kv_bytes_per_token": 5.0, "id": "my-hunter2"}).cleaned(Redactor(("hunter2",)).clean)
    assert json.loads(text) == {"kv_bytes_per_token": 5.0, "id": f"my-{REDACTED}"}


def test_record_texts_with_several_words_are_removed() -> None:
    [plain] = safe_texts(processes([router(request("a", prompt="never so"))]))
    assert plain["requests"][0]["decided"]["prompt"] == "" and plain["requests"][0]["request_id"] == "a"
