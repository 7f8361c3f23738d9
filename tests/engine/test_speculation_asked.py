"""How many tokens a request lets be drafted: never more than the engine's own limit, and with the same answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.engine import LLM, SamplingParams
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, Request
from baton.engine.sampling.params import SamplingParams as EngineParams
from baton.engine.scheduler.drafts import PerSequenceDrafter
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.speculation import Speculation
from baton.text.sampling import FieldRefused
from baton.text.speculation import MOST_SPECULATIVE_TOKENS, most_drafted
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.step_times import drafts_always_pay

MOST = 4


class Sevens:
    """Always right here."""

    def draft(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        return [7] * most


def most_rows(asked: int | None) -> int:
    """Of one answer's steps."""
    speculation = Speculation(MOST, drafter=PerSequenceDrafter(Sevens))
    scheduler = Scheduler(BlockPool(64), 4, max_step_tokens=64, max_sequences=8, speculation=speculation)
    scheduler.add(Request(0, (1, 2, 3), EngineParams(max_tokens=60, most_drafted=asked), ()))
    rows = [1]
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, [Computed((Drawn(7, 0.0),))] * len(plan.chunks))
        scheduler.observe(plan, duration_s=1.0)
        rows.append(len(plan.chunks))
    return max(rows)


@pytest.mark.parametrize(("asked", "drafted"), [(None, MOST), (0, 0), (1, 1), (3, 3), (60, MOST)])
def test_no_more_is_drafted_than_the_request_lets(asked: int | None, drafted: int) -> None:
    assert most_rows(asked) == 1 + drafted


@pytest.mark.parametrize(
    ("method", "tokens", "most"),
    [("ngram", None, None), ("ngram", 3, 3), ("draft_model", 2, 2), ("off", None, 0), ("off", 3, 0)],
)
def test_requested_speculation_is_used(method: str, tokens: int | None, most: int | None) -> None:
    assert most_drafted(method, tokens) == most


@pytest.mark.parametrize("tokens", [0, MOST_SPECULATIVE_TOKENS + 1])
def test_number_out_of_range_is_refused_with_the_limit(tokens: int) -> None:
    with pytest.raises(FieldRefused, match=f"num_speculative_tokens: must be from 1 to 64, not {tokens}"):
        most_drafted("ngram", tokens)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=11)
    config = {"method": "ngram", "num_speculative_tokens": MOST}
    return LLM(
        str(folder), dtype="float32", device="cpu", quiet=True, kv_cache_memory_bytes=8 << 20, speculative_config=config
    )


def answer(llm: LLM, **fields: Any) -> tuple[list[int], int]:
    """Its tokens, and how many were drafted for it."""
    speculation = llm._engine.scheduler.speculation
    assert speculation is not None
    before = speculation.done.drafted_tokens
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, **fields)
    [output] = llm.generate(["Ku nomi Ku nomi Ku nomi"], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), speculation.done.drafted_tokens - before


def test_offline_request_turns_drafts_off_and_its_answer_stays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_always_pay(monkeypatch)
    plain, drafted = answer(llm)
    assert drafted > 0
    assert answer(llm, speculative={"method": "off"}) == (plain, 0)
    assert answer(llm, speculative={"method": "ngram", "num_speculative_tokens": 64})[0] == plain


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"method": "eagle"}, "speculative.method"),
        ({"num_speculative_tokens": 65}, "speculative.num_speculative_tokens"),
        ({"num_speculative_tokens": "3"}, "speculative.num_speculative_tokens"),
        ({"method": "ngram", "model": "x"}, "speculative.model"),
    ],
)
def test_offline_request_that_cannot_be_names_the_field(llm: LLM, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        answer(llm, speculative=asked)
