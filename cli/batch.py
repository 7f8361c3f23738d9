"""Answer a file of requests offline (`baton batch`).

A repeated run continues: it skips requests with a complete line in the output and removes an incomplete last line.
"""

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from baton.cli.offline_options import BatchOptions
from baton.launch import CommandFailed
from baton.launch.model_source import find_adapters, find_model
from baton.launch.paths import ROOT
from baton.router.http.batches.lines import EMBEDDING, BatchRequest, LineRefused, read_lines

if TYPE_CHECKING:
    from baton.cli.batch_requests import Ready, ReadyInputs
    from baton.engine import RequestOutput


def answer_line(answered: "Ready", output: "RequestOutput") -> dict[str, Any]:
    """Return the output line of an answered request."""
    request = answered.request
    choices = [choice_of(answered, completion) for completion in output.outputs]
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    body = {
        "id": request.custom_id,
        "object": "chat.completion" if request.is_chat else "text_completion",
        "model": answered.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    return _line(request, body)


def _line(request: BatchRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": 200, "request_id": request.custom_id, "body": body}
    return {"id": request.custom_id, "custom_id": request.custom_id, "response": response, "error": None}


def choice_of(answered: "Ready", completion: Any) -> dict[str, Any]:
    """Return a choice as the request's API formats it: chat or completions."""
    text, reason = completion.text, completion.finish_reason
    content = answered.answer(text, reason) if answered.request.is_chat else {"text": text, "finish_reason": reason}
    return {"index": completion.index, **content}


def error_line(request: BatchRequest, refused: LineRefused) -> dict[str, Any]:
    """Return the output line of a rejected request. A repeated run skips this request."""
    error = {"code": "invalid_request", "message": str(refused), "param": refused.param}
    return {"id": request.custom_id, "custom_id": request.custom_id, "response": None, "error": error}


def run_batch(options: BatchOptions) -> int:
    """Answer the requests; return 0 if all were answered, 1 if some were rejected. Raises: CommandFailed."""
    requests = read_requests(options.source)
    with opened(options.target) as target:
        done = finished_ids(target, options.target)
        unknown = done - {request.custom_id for request in requests}
        if unknown:
            raise CommandFailed(
                f"{options.target} answers {sorted(unknown)[0]}, which is not in {options.source}; give another file"
            )
        left = [request for request in requests if request.custom_id not in done]
        sys.stderr.write(f"{len(requests)} requests, {len(done)} answered before\n")
        if left:
            answer_all(options, left, target)
        return report(target, options.target)


def read_requests(path: Path) -> list[BatchRequest]:
    """Read the file of requests. Raises: CommandFailed."""
    try:
        return read_lines(path.read_bytes())
    except OSError as error:
        raise CommandFailed(f"{path}: {error}") from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open and lock the output. Raises: CommandFailed."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandFailed(f"{path}: another `baton batch` is writing it") from error
        yield file


def finished_ids(file: BinaryIO, path: Path) -> set[str]:
    """Return the ids of complete output lines, and remove an incomplete last line. Raises: CommandFailed."""
    file.seek(0)
    content = file.read()
    complete = content.rfind(b"\n") + 1
    try:
        done = {str(json.loads(line)["custom_id"]) for line in content[:complete].splitlines() if line.strip()}
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{path} is not an output of `baton batch`; give another file") from error
    file.truncate(complete)
    return done


def answer_all(options: BatchOptions, requests: Sequence[BatchRequest], target: BinaryIO) -> None:
    """Load the model and answer all requests. Raises: CommandFailed."""
    from baton.cli.batch_requests import Validator, embedded
    from baton.engine import LLM, LoRARequest
    from baton.engine.config.model_config import ModelError
    from baton.router.model.defaults import ModelFolderError

    with tempfile.TemporaryDirectory(prefix="baton-batch-") as scratch:
        model = find_model(options.model, ROOT, Path(scratch))
        adapters = find_adapters(options.adapter or (), model.name)
        loras = {each.name: LoRARequest(each.name, n, str(each.folder)) for n, each in enumerate(adapters, start=1)}
        try:
            llm = LLM(
                str(model.folder),
                device=options.device,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                kv_cache_memory_bytes=options.kv_memory,
                kv_cache_dtype=options.kv_cache_dtype,
                quantization=None if options.quantize == "none" else options.quantize,
                enable_lora=bool(adapters),
            )
            names = {model.name: None} | ({options.model: None} if options.model else {}) | loras
            validator = Validator(llm, model.folder, names)
        except (ModelError, ModelFolderError, ValueError) as error:
            raise CommandFailed(str(error)) from error
        ready: list[Ready] = []
        inputs: list[ReadyInputs] = []
        with closing(validator):
            for request in requests:
                try:
                    if request.url == EMBEDDING and request.fault is None:
                        inputs.append(validator.inputs(request))
                    else:
                        ready.append(validator.ready(request))
                except LineRefused as refused:
                    write(target, error_line(request, refused))
        prompts, params = [each.prompt for each in ready], [each.params for each in ready]
        try:
            for output in llm.finished(prompts, params, use_tqdm=True, loras=[each.lora for each in ready]):
                answered = ready[int(output.request_id)]
                write(target, answer_line(answered, output))
            for line, vectors in embedded(llm, inputs):
                write(target, _line(line.request, line.body(vectors)))
        except ModelError as error:  # an adapter cannot be loaded
            raise CommandFailed(str(error)) from error
    os.fsync(target.fileno())


def write(target: BinaryIO, line: dict[str, object]) -> None:
    """Write a line and flush it, so that it survives a SIGKILL of this process."""
    target.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
    target.flush()


def report(target: BinaryIO, path: Path) -> int:
    """Print the numbers of answered and rejected requests; return the exit code."""
    target.seek(0)
    lines = [json.loads(line) for line in target.read().splitlines()]
    refused = sum(1 for line in lines if line["error"] is not None)
    sys.stderr.write(f"{path}: {len(lines) - refused} answered, {refused} rejected\n")
    return 1 if refused else 0
