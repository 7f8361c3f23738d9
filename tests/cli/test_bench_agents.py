"""`baton bench clients agents`: an imitated agent, whose faults the figures show."""

import sys
from pathlib import Path

import pytest

from baton.lab.benchmarks.agents.run import TARGET_SHARE, session

AGENT = """#!{python}
import json, os, subprocess, urllib.request
config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])["provider"]["baton"]["options"]
parameters = {{"type": "object", "properties": {{"command": {{"type": "string"}}}}}}
tools = [{{"type": "function", "function": {{"name": "bash", "parameters": parameters}}}}]
messages = [{{"role": "system", "content": "You are an agent."}}, {{"role": "user", "content": "go"}}]
while True:
    {fault}
    body = json.dumps({{"model": "zero", "messages": messages, "tools": tools}}).encode()
    asked = urllib.request.Request(config["baseURL"] + "/chat/completions", body)
    asked.add_header("content-type", "application/json")
    message = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    if "tool_calls" not in message:
        break
    messages.append({{"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]}})
    for call in message["tool_calls"]:
        subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, check=True)
        messages.append({{"role": "tool", "tool_call_id": call["id"], "content": "ok"}})
"""


@pytest.mark.parametrize(
    ("fault", "exact", "repeats"),
    [
        ("pass", True, True),
        ("messages[0]['content'] = f'It is turn {len(messages)}.'", True, False),
        ("open('calls.txt', 'a').write('0 ') if len(messages) == 4 else None", False, True),
    ],
)
async def test_session_shows_lost_calls_and_prompts_that_change(
    tmp_path: Path, fault: str, exact: bool, repeats: bool
) -> None:
    program = tmp_path / "node_modules" / ".bin" / "opencode"
    program.parent.mkdir(parents=True)
    program.write_text(AGENT.format(python=sys.executable, fault=fault))
    program.chmod(0o755)

    figures = await session("opencode", tmp_path, turns=3)

    assert (figures.exit_code, figures.turns, figures.calls_exact) == (0, 4, exact)
    assert (figures.repeated_share >= TARGET_SHARE) is repeats
    assert figures.is_good is (exact and repeats)
