"""`baton timeline` on a real stack: all requests, steps and flows are in the file, found by SQL as in Perfetto."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient
from tests.e2e.stack import Stack

REQUESTS, TOKENS, PROMPT_TOKENS = 6, 30, 100


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    """Create the tables of Perfetto's trace processor that the tests use."""
    with sqlite3.connect(":memory:") as made:
        made.execute("CREATE TABLE slice (pid INT, lane INT, category TEXT, name TEXT, ts REAL, dur REAL, args TEXT)")
        made.execute("CREATE TABLE flow (id INT, name TEXT, pid INT, lane INT, ts REAL, is_end INT)")
        made.execute("CREATE TABLE process (pid INT, name TEXT)")
        made.execute("CREATE TABLE thread (pid INT, lane INT, name TEXT)")
        made.execute("CREATE TABLE counter (pid INT, name TEXT, ts REAL, value REAL)")
        yield made


def load(database: sqlite3.Connection, trace: dict[str, Any]) -> None:
    """Read all events by the rules of the Trace Event Format; an unknown kind fails."""
    for event in trace["traceEvents"]:
        match event["ph"]:
            case "X":
                columns = (event["pid"], event["tid"], event["cat"], event["name"], event["ts"], event["dur"])
                database.execute("INSERT INTO slice VALUES (?,?,?,?,?,?,?)", (*columns, json.dumps(event["args"])))
            case "s" | "f" as end:
                columns = (event["id"], event["name"], event["pid"], event["tid"], event["ts"], end == "f")
                database.execute("INSERT INTO flow VALUES (?,?,?,?,?,?)", columns)
            case "C":
                rows = [(event["pid"], event["name"], event["ts"], value) for value in event["args"].values()]
                database.executemany("INSERT INTO counter VALUES (?,?,?,?)", rows)
            case "M" if event["name"] == "process_name":
                database.execute("INSERT INTO process VALUES (?,?)", (event["pid"], event["args"]["name"]))
            case "M" if event["name"] == "thread_name":
                columns = (event["pid"], event["tid"], event["args"]["name"])
                database.execute("INSERT INTO thread VALUES (?,?,?)", columns)
            case "M" | "i":
                assert event["name"]
            case other:
                raise AssertionError(other)


def timeline(stack: Stack, out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "baton.cli", "timeline", *arguments, "--out", str(out)]
    command += ["--admin", f"127.0.0.1:{stack.admin_port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout
    trace: dict[str, Any] = json.loads(out.read_text())
    return trace


async def answered(stack: Stack) -> list[str]:
    names = [f"timeline-{uuid.uuid4().hex}" for _ in range(REQUESTS)]
    async with AsyncBatonClient(stack.target, timeout_s=60) as client:
        await asyncio.gather(
            *(
                client.complete(
                    [7 + index] * PROMPT_TOKENS, max_tokens=TOKENS, ignore_eos=True, cache_salt=name, request_id=name
                )
                for index, name in enumerate(names)
            )
        )
    return names


def rows(database: sqlite3.Connection, query: str, *values: Any) -> list[tuple[Any, ...]]:
    return database.execute(query, values).fetchall()


async def test_every_request_step_and_flow_is_in_the_file(
    stack: Stack, tmp_path: Path, database: sqlite3.Connection
) -> None:
    names = await answered(stack)
    load(database, await asyncio.to_thread(timeline, stack, tmp_path / "timeline.json", "--last", "1m"))
    processes = {name.partition(" ")[0]: pid for pid, name in rows(database, "SELECT pid, name FROM process")}
    assert set(processes) == {"clients", "router", "prefill-0", "decode-0"}
    for name in names:
        places = rows(database, "SELECT pid FROM slice WHERE category = 'request' AND name = ?", name)
        assert sorted(pid for (pid,) in places) == sorted(
            processes[each] for each in ("router", "prefill-0", "decode-0")
        )
        [(computed,)] = rows(
            database,
            "SELECT sum(each.value) FROM slice, json_each(slice.args, '$.prompts') AS each "
            "WHERE category = 'step' AND pid = ? AND each.key = ?",
            processes["prefill-0"],
            name,
        )
        assert computed == PROMPT_TOKENS
        [(steps,)] = rows(
            database,
            "SELECT count(*) FROM slice, json_each(slice.args, '$.requests') AS each "
            "WHERE category = 'step' AND pid = ? AND each.value = ?",
            processes["decode-0"],
            name,
        )
        assert steps == TOKENS - 1  # the first token is that of the prefill worker
    transfers = rows(database, "SELECT args FROM slice WHERE category = 'transfer'")
    assert {json.loads(args)["request"] for (args,) in transfers} >= set(names)


async def test_flows_lead_from_slice_to_slice(stack: Stack, tmp_path: Path, database: sqlite3.Connection) -> None:
    [name, *_] = await answered(stack)
    load(database, await asyncio.to_thread(timeline, stack, tmp_path / "timeline.json", name))
    assert rows(database, "SELECT count(*) FROM slice WHERE category = 'client'") == [(2,)]
    ends = (
        "SELECT flow.id, flow.is_end, slice.pid, slice.category, slice.name FROM flow LEFT JOIN slice ON "
        "slice.pid = flow.pid AND slice.lane = flow.lane AND flow.ts BETWEEN slice.ts AND slice.ts + slice.dur"
    )
    found = rows(database, ends)
    assert all(category is not None for _, _, _, category, _ in found)
    numbers = [number for (number,) in rows(database, "SELECT id FROM flow")]
    assert sorted(numbers) == sorted(2 * list(set(numbers)))
    from_router = [number for number, is_end, _, _, slice_name in found if not is_end and slice_name == name]
    assert len(set(from_router)) >= 2  # to the prefill and the decode worker


async def test_lanes_are_named_their_slices_do_not_cross_and_counters_stay_within_the_pool(
    stack: Stack, tmp_path: Path, database: sqlite3.Connection
) -> None:
    await answered(stack)
    load(database, await asyncio.to_thread(timeline, stack, tmp_path / "timeline.json", "--last", "1m"))
    unnamed = "SELECT DISTINCT pid, lane FROM slice EXCEPT SELECT pid, lane FROM thread"
    assert rows(database, unnamed) == []
    crossing = (
        "SELECT count(*) FROM slice AS a, slice AS b "
        "WHERE a.pid = b.pid AND a.lane = b.lane AND a.category = 'request' "
        "AND b.category = 'request' AND a.rowid < b.rowid AND a.ts < b.ts + b.dur AND b.ts < a.ts + a.dur"
    )
    assert rows(database, crossing) == [(0,)]
    blocks = {
        pool for (pool,) in rows(database, "SELECT sum(value) FROM counter WHERE name = 'KV blocks' GROUP BY pid, ts")
    }
    assert len(blocks) == 1


def test_undrawable_timeline_is_an_error_with_its_reason(stack: Stack, tmp_path: Path) -> None:
    for arguments, message in (
        (["no-such-request"], "knows no-such-request"),
        (["--last", "ever"], "is not a time of up to an hour"),
    ):
        command = [sys.executable, "-m", "baton.cli", "timeline", *arguments, "--out", str(tmp_path / "no.json")]
        command += ["--admin", f"127.0.0.1:{stack.admin_port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and message in done.stderr
    assert not (tmp_path / "no.json").exists()
