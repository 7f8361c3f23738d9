"""Workers that answer agents from a script, through the sessions of a real router.

`-m baton.lab.benchmarks.agents.worker FOLDER PREFILL_PORT DECODE_PORT INTERVAL_MS SCRIPT PROMPTS` runs a prefill and a
decode worker. SCRIPT is a JSON file with a list of texts: the n-th answers a prompt that has n results of tools. A
prompt without tools gets a title. For each prompt with tools, a JSON line is appended to PROMPTS.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy
from tokenizers import Tokenizer

from baton.lab.benchmarks.router.worker import ZeroSequence, ZeroWorker, serve_workers
from baton.launch.tiny_checkpoint import SPECIAL
from baton.process.serving.server import run
from baton.protos import session_pb2

CONTEXT_TOKENS = 1 << 19
RESULT, TOOLS = "<tool_response>", "# Tools"
"""Texts of the generic format of tools, by which prompts are recognised."""
TITLE = "Title"
_END = SPECIAL.index("<|im_end|>")


class Script:
    """Answers by the number of results in a prompt, and the record of all prompts."""

    def __init__(self, folder: Path, answers: list[str], record: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._answers = answers
        self._record = record
        self._prompts: list[numpy.ndarray] = []
        self._known: dict[int, list[int]] = {}  # answers by attempt: both workers ask for them

    def answer(self, attempt_id: int, token_ids: list[int]) -> list[int]:
        """Return the tokens that answer a prompt, and record the prompt."""
        if attempt_id not in self._known:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            step = text.count(RESULT) if TOOLS in text else None
            answer = TITLE if step is None else self._answers[min(step, len(self._answers) - 1)]
            self._known[attempt_id] = [*self._tokenizer.encode(answer).ids, _END]
            if step is not None:
                self._note(numpy.array(token_ids), step)
        return self._known[attempt_id]

    def _note(self, prompt: numpy.ndarray, step: int) -> None:
        """Record the length of a prompt, and how much of the most similar earlier prompt it repeats."""
        repeated = max(((_common(earlier, prompt), len(earlier)) for earlier in self._prompts), default=(0, 0))
        self._prompts.append(prompt)
        line = {"step": step, "tokens": len(prompt), "repeated": repeated[0], "earlier": repeated[1]}
        with self._record.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def _common(one: numpy.ndarray, other: numpy.ndarray) -> int:
    """Return the number of equal tokens at the beginning."""
    size = min(len(one), len(other))
    different = numpy.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


class ScriptedWorker(ZeroWorker):
    """Worker that answers from a script, one token per step."""

    def __init__(self, role: "session_pb2.Role", folder: str, script: Script) -> None:
        super().__init__(role, folder)
        self.info.model.max_model_len = CONTEXT_TOKENS
        self._script = script

    def _begun(self, command: Any) -> ZeroSequence:
        answer = self._script.answer(command.attempt_id, list(command.token_ids))
        return ZeroSequence(command.attempt_id, 0, min(len(answer), command.sampling.max_tokens), answer)


def main(folder: str, ports: tuple[int, int], interval_s: float, script: Path, record: Path) -> int:
    answers = Script(Path(folder), json.loads(script.read_text()), record)
    roles = (session_pb2.ROLE_PREFILL, session_pb2.ROLE_DECODE)
    return run(serve_workers([ScriptedWorker(role, folder, answers) for role in roles], ports, interval_s))


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(given[0], (int(given[1]), int(given[2])), float(given[3]) / 1e3, Path(given[4]), Path(given[5])))
