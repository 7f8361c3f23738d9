"""Elastic worker that computes real KV and answers agents from a script.

`-m baton.lab.benchmarks.agents.worker MODEL SCRIPT RECORD [flags of the elastic worker ...]`. SCRIPT is a JSON file
with the fields of `SessionAnswers`. Masks, as of structured output, leave one token at each step, so that prompts and
answers pass through steps, caches, transfers and files like any others. A JSON line is appended to RECORD for each
`AgentEvent`.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.engine.sampling.constraint import AllowedDrafts, Constraint, MaskBuffer
from baton.engine.sampling.mask_threads import Mask
from baton.launch.tiny_checkpoint import SPECIAL
from baton.protos import session_pb2
from baton.worker.main import start

RESULT, TOOLS = "<tool_response>", "# Tools"
"""Texts of the generic format of tools: of each result, and of the description."""
TITLE = "Title"
PROMPT_SENT, ANSWER_STARTED, ANSWER_HALF = "prompt sent", "answer started", "answer half"
_END = SPECIAL.index("<|im_end|>")
Command = session_pb2.Prefill | session_pb2.Start


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """Event of a prompt on the worker with process id `pid`.

    `kind`: a command arrived for prefill (PROMPT_SENT) or for the answer (ANSWER_STARTED), or half of the answer's
    tokens were sampled (ANSWER_HALF). `step`: number of earlier turns in the prompt; None for a prompt of another kind.
    """

    kind: str
    step: int | None
    pid: int
    request_id: str
    prompt: Sequence[int] = ()  # token ids, with ANSWER_STARTED
    answer: Sequence[int] = ()  # token ids, with ANSWER_STARTED


@dataclass(frozen=True, slots=True)
class SessionAnswers:
    """Answers of a session. `texts`: the n-th answers a prompt that has `counted` n times.

    `within`: text of the session's prompts. A prompt without it, such as one that asks for a title, gets TITLE.
    """

    texts: Sequence[str]
    counted: str = RESULT
    within: str = TOOLS

    def step(self, prompt: str) -> int | None:
        return prompt.count(self.counted) if self.within in prompt else None

    def text(self, step: int | None) -> str:
        return TITLE if step is None else self.texts[min(step, len(self.texts) - 1)]


class ScriptedAnswer(Constraint):
    """Constraint that allows only the next token of an answer."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int, on_half: Callable[[], None]) -> None:
        self._token_ids, self._vocab_size, self._on_half = token_ids, vocab_size, on_half

    def mask(self, choice: int, history: Sequence[int], prompt_tokens: int, drafted_tokens: int = 0) -> Mask:
        position = len(history) - prompt_tokens
        if position == len(self._token_ids) // 2:
            self._on_half()
        token_id, room = self._token_ids[position], MaskBuffer(self._vocab_size)
        room.words[token_id // 32] = 1 << token_id % 32
        return Mask.of(room.allowed)

    def vet(
        self, choice: int, history: Sequence[int], prompt_tokens: int, drafted: Sequence[int], most: int
    ) -> AllowedDrafts:
        return AllowedDrafts()


class Script:
    """Answers of a session, and the record of all prompts."""

    def __init__(self, model: Path, answers: SessionAnswers, record: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._answers = answers
        self._record = record

    def answer(self, command: Command) -> ScriptedAnswer:
        """Return the constraint for the answer to a command, and record the command."""
        prompt = list(command.token_ids[: len(command.token_ids) - command.answered_tokens])
        step = self._answers.step(self._tokenizer.decode(prompt, skip_special_tokens=False))
        token_ids = [*self._tokenizer.encode(self._answers.text(step)).ids, _END]
        event = AgentEvent(PROMPT_SENT, step, os.getpid(), command.request_id)
        if isinstance(command, session_pb2.Start):
            self._note(replace(event, kind=ANSWER_STARTED, prompt=prompt, answer=token_ids))
        else:
            self._note(event)
        note_half = partial(self._note, replace(event, kind=ANSWER_HALF))
        return ScriptedAnswer(token_ids, self._tokenizer.get_vocab_size(), note_half)

    def _note(self, event: AgentEvent) -> None:
        """Append an event in one write, since several workers share the file."""
        with self._record.open("ab", buffering=0) as lines:
            lines.write(json.dumps(asdict(event)).encode() + b"\n")


def answer_from(script: Script) -> None:
    """Patch the roles of this process so that their requests get the answers of a script."""
    from baton.decode_worker import service as decode
    from baton.prefill_worker import service as prefill
    from baton.worker.wire import request_of

    def scripted(request_id: int, command: Command, params: Any, *further: Any) -> Any:
        return request_of(request_id, command, replace(params, constraint=script.answer(command)), *further)

    services: tuple[Any, ...] = (decode, prefill)
    for service in services:
        service.request_of = scripted


def main() -> int:
    """Patch the roles, then run the elastic worker."""
    model, script, record = map(Path, sys.argv[1:4])
    del sys.argv[1:4]
    answer_from(Script(model, SessionAnswers(**json.loads(script.read_text())), record))
    return start("baton.elastic_worker", "elastic", "ElasticConfig")


if __name__ == "__main__":
    sys.exit(main())
