"""Service for agents, with workers that answer from a script, and kills of its processes in the middle of answers."""

import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.lab.benchmarks.agents.worker import ANSWER_HALF, PROMPT_SENT, AgentEvent
from baton.lab.chaos.stack import ChaosStack, Layout, ProcessPlace, TierFolder
from baton.launch.processes import ProcessSpec, Stage

LAYOUT = Layout(routers=1, prefill=1, decode=2)
KINDS = ("decode", "prefill", "redis", "router")
"""Kinds of processes to kill, in this order."""
READY_S = 120.0
BLOCK_TOKENS = 32
_POLL_S = 0.005
_SILENCE_S = 10.0  # after which a link is lost: agents take the cores for seconds; a killed process is noticed sooner
_KV_MEMORY, _TIER_SIZE = "256MiB", "4GiB"


@contextmanager
def existing(path: Path) -> Iterator[None]:
    """Create a file that exists inside the `with` block."""
    path.touch()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


class EventFile:
    """Reader of a file to which workers append events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def skip(self) -> None:
        """Skip the events so far."""
        self._position = self._path.stat().st_size

    def new_events(self) -> list[AgentEvent]:
        """Return the events since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        lines = text[: text.rfind(b"\n") + 1]
        self._position += len(lines)
        return [AgentEvent(**json.loads(line)) for line in lines.splitlines()]


class AgentsStack(ChaosStack):
    """Redis, a router, a prefill worker and two decode workers, with KV in files, under a supervisor."""

    def __init__(self, folder: Path, model: Path, script: Path, record: Path) -> None:
        flags = ("--block-size", BLOCK_TOKENS, "--kv-memory", _KV_MEMORY, "--kv-tier-size", _TIER_SIZE)
        checks = ("--checksum-share", 0.001, "--kv-check-share", 0.01)  # defaults, since checks take time
        worker_flags = tuple(map(str, (*flags, *checks)))
        tier = folder / "kv"
        tier.mkdir()
        super().__init__(model, folder, None, LAYOUT, worker_flags, tier=TierFolder(tier))
        self._scripted = (model, script, record)
        self.record = record
        self.url = f"http://{self.routers[0].direct.partition(':')[0]}:{self.routers[0].http_port}"
        self.trace_file = folder / f"{self.routers[0].name}-trace.jsonl"

    def _spec(self, place: ProcessPlace, module: str, arguments: Sequence[object], stage: Stage) -> ProcessSpec:
        if stage is Stage.WORKER:
            return super()._spec(place, "lab.benchmarks.agents.worker", (*self._scripted, *arguments), stage)
        return super()._spec(place, module, (*arguments, "--session-silence-s", _SILENCE_S), stage)

    def prompt_events(self) -> list[AgentEvent]:
        return EventFile(self.record).new_events()

    async def kill_each(
        self, kinds: Sequence[str], turns: int, restarting: Path, killed: list[str], started: Path | None
    ) -> None:
        """Kill one process of each kind, evenly spread over a session; add the names of the killed to `killed`.

        A prefill worker is killed while it computes a prompt, any other process in the middle of an answer. The next
        kill waits until all processes serve again; until then, the file `restarting` exists. `started`: file with the
        numbers of the turns whose commands have started, if the router must be killed during a command instead, since
        the agent does not repeat a request whose answer breaks off. Raises: NotWhole.
        """
        for number, kind in enumerate(kinds, 1):
            awaited = PROMPT_SENT if kind == "prefill" else ANSWER_HALF
            event = await self._next_event(awaited, number * turns // (len(kinds) + 1))
            names = [name for name, pid in self.pids().items() if name.startswith(kind)]
            name = next((each for each in names if self.pids()[each] == event.pid), names[0])
            with existing(restarting):
                if kind == "router" and started is not None:
                    await _next_line(started)
                if (life := self.life(name)) is not None:
                    self.send(life, signal.SIGKILL)
                    killed.append(name)
                await self.wait_whole(READY_S)

    async def _next_event(self, kind: str, step: int) -> AgentEvent:
        """Wait for the next event of a kind in this or a later step of the session."""
        events = EventFile(self.record)
        events.skip()
        while True:
            for event in events.new_events():
                if event.kind == kind and event.step is not None and event.step >= step:
                    return event
            await asyncio.sleep(_POLL_S)


async def _next_line(file: Path) -> None:
    """Wait until a file is longer than now."""
    size = _size(file)
    while True:
        if _size(file) > size:
            return
        await asyncio.sleep(_POLL_S)


def _size(file: Path) -> int:
    return file.stat().st_size
