"""`baton bench clients agents`: an imitated agent, over a kill and with faults that the figures show."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.lab.benchmarks.agents.figures import TARGET_SHARE
from baton.lab.benchmarks.agents.run import session
from baton.lab.benchmarks.agents.stack import AgentsStack
from baton.lab.benchmarks.agents.tested import TESTED
from baton.lab.chaos.stack import NotWhole
from tests.fixtures.forked_programs import fork_programs

AGENT = """#!{python}
# Sends requests in the shape of Claude Code's, and sends a request again if its stream breaks.
import http.client, json, os, subprocess, time, urllib.error, urllib.request, uuid

def tool(name, *fields):
    properties = {{field: {{"type": "string"}} for field in fields}}
    schema = {{"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}}
    return {{"name": name, "description": f"{{name}} of the agent.", "input_schema": schema}}

TOOLS = [
    tool("Bash", "command", "description"), tool("Read", "file_path"),
    tool("Edit", "file_path", "old_string", "new_string"),
]
USER = json.dumps({{"device_id": "d", "account_uuid": "", "session_id": str(uuid.uuid4())}})
messages = [{{"role": "user", "content": [{{"type": "text", "text": "go", "cache_control": {{"type": "ephemeral"}}}}]}}]

def answer(system):
    body = {{
        "model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 1024, "stream": True, "messages": messages,
        "system": system, "tools": TOOLS, "metadata": {{"user_id": USER}}, "thinking": {{"type": "disabled"}},
        "context_management": {{"edits": []}},
    }}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true"
    asked = urllib.request.Request(url, json.dumps(body).encode())
    asked.add_header("content-type", "application/json")
    blocks, is_complete = [], False
    for line in urllib.request.urlopen(asked):
        event = json.loads(line[5:]) if line.startswith(b"data:") else {{}}
        match event.get("type"):
            case "content_block_start":
                blocks.append({{**event["content_block"], "input": ""}})
            case "content_block_delta":
                blocks[-1]["input"] += event["delta"].get("partial_json", "")
            case "message_stop":
                is_complete = True
    if not is_complete:
        raise http.client.IncompleteRead(b"")
    return [block for block in blocks if block["type"] == "tool_use"]

def run(name, given):
    if name == "Bash":
        return subprocess.run(given["command"], shell=True, check=True, capture_output=True, text=True).stdout
    text = open(given["file_path"]).read()
    if name == "Edit":
        open(given["file_path"], "w").write(text.replace(given["old_string"], given["new_string"]))
    return text

while True:
    {fault}
    system = [{{"type": "text", "text": text}} for text in (
        f"x-anthropic-billing-header: cc_version=2; cch={{uuid.uuid4().hex[:5]}};", "You are an agent. " * 400)]
    for _ in range(60):
        try:
            calls = answer(system)
            break
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)
    if not calls:
        break
    calls = [{{**call, "input": json.loads(call["input"])}} for call in calls]
    messages.append({{"role": "assistant", "content": calls}})
    results = [(call["id"], run(call["name"], call["input"])) for call in calls]
    messages.append({{"role": "user", "content": [
        {{"type": "tool_result", "tool_use_id": call_id, "content": content}} for call_id, content in results
    ]}})
"""
FORGETFUL = "messages[0]['content'] = f'It is turn {len(messages)}.' * 40"
NEVER_REPEATS = "range = lambda count: [0]"
WRITES_TWICE = "open('calls.txt', 'a').write('0 ') if len(messages) == 3 else None"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_programs(monkeypatch)


def imitate(folder: Path, fault: str) -> None:
    program = folder / "node_modules" / ".bin" / "claude"
    program.parent.mkdir(parents=True)
    program.write_text(AGENT.format(python=sys.executable, fault=fault))
    program.chmod(0o755)


async def test_session_over_a_killed_decode_worker_keeps_calls_and_cache(tmp_path: Path) -> None:
    imitate(tmp_path, fault="pass")
    figures = await session("claude", tmp_path, turns=4, kills=("decode",))

    measured = figures.session
    assert (figures.exit_code, len(measured.turns), figures.calls_exact) == (0, 5, True)
    assert len(figures.killed) == 1 and figures.killed[0].startswith("decode-")
    assert measured.repeated_share >= TARGET_SHARE
    assert measured.turns[-1].reusable_tokens > 0.8 * measured.turns[-1].prompt_tokens
    assert measured.cached_share >= TARGET_SHARE


async def test_agent_session_survives_a_router_killed_during_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(tmp_path, fault=NEVER_REPEATS)
    monkeypatch.setitem(TESTED, "claude", replace(TESTED["claude"], repeats_broken=False))
    figures = await session("claude", tmp_path, turns=7, kills=("router",))

    assert (figures.exit_code, figures.calls_exact, figures.killed) == (0, True, ["router-0"])
    assert figures.session.cached_share >= TARGET_SHARE


async def test_session_with_a_faulty_agent_shows_its_faults(tmp_path: Path) -> None:
    imitate(tmp_path, fault=f"{FORGETFUL}; {WRITES_TWICE}")
    figures = await session("claude", tmp_path, turns=2)
    assert not figures.calls_exact
    assert figures.session.repeated_share < TARGET_SHARE
    assert not figures.is_good


async def test_stack_whose_workers_exit_fails_at_once_and_shows_its_log(tmp_path: Path) -> None:
    stack = AgentsStack(tmp_path, tmp_path / "no-model", tmp_path / "script.json", tmp_path / "prompts.jsonl")
    await stack.start()
    try:
        with pytest.raises(NotWhole, match=r"not restarting it(?s:.*)script.json"):
            await stack.wait_whole(math.inf)
    finally:
        await stack.stop()
