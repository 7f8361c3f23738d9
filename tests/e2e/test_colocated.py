"""Decode workers that compute prompts themselves answer like transformers; one family is also run with prefill."""

import asyncio
import json
from pathlib import Path

import jsonschema

from baton.client import AsyncBatonClient, Delta, GenerateOptions
from tests.e2e.oracle import Oracle, ask_transformers, check_answers, make_asked
from tests.e2e.stack import make_stack
from tests.e2e.test_up import READY_S, STOP_S, Up
from tests.fixtures.random_schemas import random_schema

FAMILY = "gpt2"  # runs with the code of transformers, unlike the models of `baton up` here and in test_token_exact.py
TOGETHER = 12


async def check_computed_by_decode(target: str, decode_pid: int, oracle: Oracle) -> None:
    """Check answers with a new cache salt, so that no KV of a prefill worker is found."""
    timings = [answer.timings for answer in await check_answers(target, oracle, cache_salt="local")]
    assert {timing.prefill_pid for timing in timings} == {decode_pid}
    assert {(timing.transport, timing.transfer_bytes) for timing in timings} == {("", 0)}


async def check_held_to_a_form(target: str) -> None:
    """Check structured output, streamed and complete."""
    schema = random_schema(23)
    options: GenerateOptions = {"json_schema": schema, "max_tokens": 200, "temperature": 1.0, "seed": 5}
    async with AsyncBatonClient(target, timeout_s=30) as client:
        [choice] = (await client.complete("Badega nomi", **options)).choices
        streamed = "".join(
            [event.text async for event in client.generate("Badega nomi", **options) if isinstance(event, Delta)]
        )
    jsonschema.validate(json.loads(choice.text), schema)
    assert streamed == choice.text


async def test_baton_up_colocated_answers_as_transformers_does(tmp_path: Path) -> None:
    model = make_asked(tmp_path / "llama", "llama")
    running = Up(tmp_path / "up.log", "--colocated", "--model", str(model))
    try:
        oracle = ask_transformers(model, TOGETHER)  # meanwhile the stack starts
        await asyncio.to_thread(running.wait_for, lambda: "ready in" in running.log.read_text(), READY_S, "readiness")
        workers = running.worker_pids()
        assert workers.keys() == {"decode-0"}
        target = f"127.0.0.1:{running.port}"
        await check_computed_by_decode(target, workers["decode-0"], oracle)
        await check_held_to_a_form(target)
        running.process.terminate()
        assert await asyncio.to_thread(running.process.wait, STOP_S) == 0
    finally:
        running.process.kill()
        running.process.wait()
    assert "Traceback" not in running.log.read_text()


async def test_family_is_answered_the_same_with_and_without_a_prefill_worker(tmp_path: Path) -> None:
    model = make_asked(tmp_path / FAMILY, FAMILY)
    stack = make_stack(tmp_path / "stack", model, router_flags=["--local-prefill-tokens", "0"])
    try:
        stack.start()
        oracle = ask_transformers(model, TOGETHER)  # meanwhile the stack starts
        stack.wait_ready()
        decode_pid = stack.processes["decode-0"].pid
        answers = await check_answers(stack.target, oracle)
        assert decode_pid not in {answer.timings.prefill_pid for answer in answers}
        assert stack.processes["prefill-0"].stop() == 0
        stack.wait_for(lambda: sum(w.connected for w in stack.status().workers) == 1, STOP_S, "loss of prefill seen")
        await check_computed_by_decode(stack.target, decode_pid, oracle)
        stack.wait_idle()
    finally:
        stack.stop()
