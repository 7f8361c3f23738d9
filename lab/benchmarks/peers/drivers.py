"""Drivers: each engine of `./baton bench peers` behind the protocol of `lines.py`, in its own environment.

    python -m baton.lab.benchmarks.peers.drivers ENGINE SOURCE THREADS PRECISION MAX_BATCH MAX_TOKENS

A driver imports its engine only after claiming stdout: what an engine prints must not mix with the answers.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from baton.lab.benchmarks.peers.lines import Round, RoundWork, Stopwatch, claim_stdout, serve

STEP_TOKENS = 2048
KV_GIB = 4
Driven = tuple[str, Callable[[RoundWork], Round]]
"""Version of the engine, and the function that runs a round on it."""


@dataclass(frozen=True)
class PeerLoad:
    """Model to load, and the amount of work."""

    source: str  # path of the checkpoint, or of its conversion for the engine
    threads: int
    precision: str
    max_batch: int
    max_tokens: int  # maximum length of a sequence


def baton(load: PeerLoad) -> Driven:
    """Drive Baton's engine like `./baton bench engine`."""
    import torch

    from baton.engine.models.linear import packs
    from baton.lab.benchmarks.engine.speed import EngineRun, EngineSetup, load_engine

    torch.set_num_threads(load.threads)
    quantize = "none" if load.precision == "bf16" else load.precision
    loaded = load_engine(EngineSetup(Path(load.source), "bfloat16", quantize, "auto", load.max_batch, load.max_tokens))
    runs: dict[int, EngineRun] = {}

    def run(work: RoundWork) -> Round:
        engine = runs.setdefault(work.batch, EngineRun(loaded, work.batch))
        prompts = work.prompts()
        prefill_s = engine.prefill_s(prompts)
        first_tokens = engine.first_tokens
        return Round(prefill_s, engine.decode_steps_s(prompts, work.new_tokens), first_tokens)

    kernels = "native" if packs(loaded.prepared.options.device) else "PyTorch"
    return f"{version('baton-serve')}, {kernels}", run


def transformers(load: PeerLoad) -> Driven:
    """Drive transformers' forward pass and cache, without a server."""
    import torch
    import transformers as library

    torch.set_num_threads(load.threads)
    model = library.AutoModelForCausalLM.from_pretrained(load.source, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(work: RoundWork) -> Round:
        prompts = torch.tensor(work.prompts())
        watch = Stopwatch()
        output = model(prompts, use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1:].argmax(-1)
        prefill_s = watch.lap()
        first_tokens = tokens[:, 0].tolist()
        steps_s = []
        for _ in range(work.new_tokens):
            output = model(tokens, past_key_values=output.past_key_values, use_cache=True)
            tokens = output.logits[:, -1:].argmax(-1)
            steps_s.append(watch.lap())
        return Round(prefill_s, steps_s, first_tokens)

    return library.__version__, run


class Stepped:
    """Driver of an engine that is stepped in this process and schedules its requests itself."""

    def __init__(
        self,
        add: Callable[[RoundWork, int], Sequence[Any]],
        step: Callable[[], object],
        has_work: Callable[[], bool],
        without_token: Callable[[Collection[Any]], Collection[Any]],
        first_token: Callable[[Any], int],
    ) -> None:
        """Create a driver. `add` returns a handle for each prompt; `without_token` selects handles without a token."""
        self._add, self._step, self._has_work = add, step, has_work
        self._without_token, self._first_token = without_token, first_token

    def run(self, work: RoundWork) -> Round:
        handles = self._add(work, 1)
        watch = Stopwatch()
        while self._has_work():
            self._step()
        prefill_s = watch.lap()
        first_tokens = [self._first_token(handle) for handle in handles]
        # Extra tokens let the first sequence run until all have begun. Handles are kept, since OpenVINO drops a
        # request whose handle is deleted.
        added = self._add(work, work.new_tokens + work.batch)
        waiting: Collection[Any] = added
        steps_s: list[float] = []
        watch.lap()
        while self._has_work():
            self._step()
            step_s = watch.lap()
            if not waiting:
                steps_s.append(step_s)
            waiting = self._without_token(waiting)
            watch.lap()
        if len(steps_s) < work.new_tokens:
            raise RuntimeError(f"{len(added)} answers of {work.new_tokens} tokens ended after {len(steps_s)} steps")
        return Round(prefill_s, steps_s[: work.new_tokens], first_tokens)


def openvino(load: PeerLoad) -> Driven:
    """Drive OpenVINO GenAI's continuous batching on a checkpoint exported by optimum-intel.

    bf16: everything in bf16; on CPUs without bf16 instructions, weights in fp16 and all else in fp32; the reported
    version says which. int8 and int4: OpenVINO's defaults for such weights, with 8-bit activations and KV.
    """
    import numpy
    import openvino as library  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_GIB
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = load.max_batch
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    named = openvino_genai.__version__.partition("-")[0]
    properties = {"INFERENCE_NUM_THREADS": str(load.threads)}
    if load.precision == "bf16":
        has_bf16 = "BF16" in library.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        numbers = "bf16" if has_bf16 else "f32"
        properties |= {"INFERENCE_PRECISION_HINT": numbers, "KV_CACHE_PRECISION": numbers}
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"  # otherwise OpenVINO quantises activations
        named += "" if has_bf16 else " in f32"
    pipeline = openvino_genai.ContinuousBatchingPipeline(load.source, scheduler, "CPU", properties)
    names = count()

    def add(work: RoundWork, new_tokens: int) -> list[Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [library.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in work.prompts()]
        return [pipeline.add_request(next(names), tensor, config) for tensor in tensors]

    def without_token(handles: Collection[Any]) -> list[Any]:
        return [handle for handle in handles if not handle.can_read()]

    def first_token(handle: Any) -> int:
        return int(handle.read_all()[0].generated_ids[0])

    stepped = Stepped(add, pipeline.step, pipeline.has_non_finished_requests, without_token, first_token)
    return named, stepped.run


def vllm(load: PeerLoad) -> Driven:
    """Drive vLLM on CPU."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: load.threads])),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import vllm as library  # type: ignore[import-not-found]

    llm = library.LLM(
        load.source,
        dtype="bfloat16",
        max_model_len=load.max_tokens,
        max_num_seqs=load.max_batch,
        max_num_batched_tokens=max(STEP_TOKENS, load.max_tokens),
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    names = count()
    outputs: dict[str, Any] = {}  # latest output by request id

    def add(work: RoundWork, new_tokens: int) -> list[str]:
        outputs.clear()
        params = library.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        added = [str(next(names)) for _ in range(work.batch)]
        for name, prompt in zip(added, work.prompts(), strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return added

    def step() -> None:
        outputs.update((output.request_id, output) for output in engine.step())

    def without_token(waiting: Collection[str]) -> list[str]:
        return [name for name in waiting if name not in outputs]

    def first_token(name: str) -> int:
        return int(outputs[name].outputs[0].token_ids[0])

    return library.__version__, Stepped(add, step, engine.has_unfinished_requests, without_token, first_token).run


LLAMACPP_BATCH_TOKENS, LLAMACPP_COMPUTED_AT_ONCE = 2048, 512  # llama.cpp's defaults
ROOM_TOKENS = 64  # spare tokens in each sequence's context
IK_LLAMACPP_S = 600.0  # maximum duration of one round, including loading


class LlamaCppContext:
    """llama.cpp context for rounds of one shape; each round clears its KV."""

    def __init__(self, library: Any, model: Any, threads: int, work: RoundWork) -> None:
        self._library = library
        params = library.llama_context_default_params()
        params.n_ctx = work.batch * (work.prompt_tokens + work.new_tokens + ROOM_TOKENS)
        params.n_batch, params.n_ubatch = LLAMACPP_BATCH_TOKENS, LLAMACPP_COMPUTED_AT_ONCE
        params.n_seq_max = work.batch
        params.n_threads = params.n_threads_batch = threads
        self._context = library.llama_init_from_model(model, params)
        self._tokens = library.llama_batch_init(LLAMACPP_BATCH_TOKENS, 0, 1)

    def run(self, work: RoundWork) -> Round:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        prefill_s, latest = 0.0, []
        for sequence, prompt in enumerate(work.prompts()):
            for start in range(0, len(prompt), LLAMACPP_BATCH_TOKENS):
                part = prompt[start : start + LLAMACPP_BATCH_TOKENS]
                self._fill([(token, start + place, sequence) for place, token in enumerate(part)])
                self._tokens.logits[len(part) - 1] = start + len(part) == len(prompt)
                prefill_s += self._decode_s()
            latest.append(self._likeliest(len(part) - 1, work.vocab_size))
        first_tokens = list(latest)
        steps_s = []
        for step in range(work.new_tokens):
            self._fill([(token, work.prompt_tokens + step, sequence) for sequence, token in enumerate(latest)])
            for index in range(work.batch):
                self._tokens.logits[index] = True
            steps_s.append(self._decode_s())
            latest = [self._likeliest(index, work.vocab_size) for index in range(work.batch)]
        return Round(prefill_s, steps_s, first_tokens)

    def _fill(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Fill the batch with id, position and sequence of each token, without logits."""
        batch = self._tokens
        batch.n_tokens = len(places)
        for index, (token, position, sequence) in enumerate(places):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = False

    def _decode_s(self) -> float:
        watch = Stopwatch()
        if self._library.llama_decode(self._context, self._tokens) != 0:
            raise RuntimeError("llama_decode failed")
        self._library.llama_synchronize(self._context)
        return watch.lap()

    def _likeliest(self, index: int, vocab_size: int) -> int:
        import numpy

        logits = self._library.llama_get_logits_ith(self._context, index)
        return int(numpy.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())


def llamacpp(load: PeerLoad) -> Driven:
    """Drive llama.cpp through its C interface, on a GGUF file. Its times exclude the choice of tokens."""
    import llama_cpp  # type: ignore[import-not-found]

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(load.source.encode(), llama_cpp.llama_model_default_params())
    contexts: dict[tuple[int, int, int], LlamaCppContext] = {}

    def run(work: RoundWork) -> Round:
        shape = (work.batch, work.prompt_tokens, work.new_tokens)
        if shape not in contexts:
            contexts[shape] = LlamaCppContext(llama_cpp, model, load.threads, work)
        return contexts[shape].run(work)

    return llama_cpp.__version__, run


def ik_llamacpp(load: PeerLoad) -> Driven:
    """Drive ik_llama.cpp by its own benchmark program, which loads the model again in each round.

    It prints only the round's total times, so every decode step counts as their mean, and no tokens, so that no first
    tokens are compared.
    """
    program = str(Path(sys.executable).parent / "llama-batched-bench")

    def run(work: RoundWork) -> Round:
        shape = {"-npp": work.prompt_tokens, "-ntg": work.new_tokens, "-npl": work.batch, "-t": load.threads}
        shape["-c"] = work.batch * (work.prompt_tokens + work.new_tokens + ROOM_TOKENS)
        shape |= {"-b": LLAMACPP_BATCH_TOKENS, "-ub": LLAMACPP_COMPUTED_AT_ONCE}
        command = [program, "-m", load.source, *(str(each) for pair in shape.items() for each in pair)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=IK_LLAMACPP_S)
        prefill_s, decode_s = ik_llamacpp_times(done.stdout + done.stderr)
        return Round(prefill_s, [decode_s / work.new_tokens] * work.new_tokens, ())

    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=IK_LLAMACPP_S)
    return " ".join((shown.stdout + shown.stderr).split()[:3]), run


def ik_llamacpp_times(output: str) -> tuple[float, float]:
    """Return the seconds of prefill and of all decode steps that llama-batched-bench printed in its table.

    Raises: RuntimeError if the table has no row of numbers.
    """
    rows = [
        line.split("|")[1:-1] for line in output.splitlines() if line.startswith("|") and line[1:].strip()[:1].isdigit()
    ]
    if not rows:
        raise RuntimeError(f"llama-batched-bench printed no row: {output[-300:]}")
    return float(rows[-1][4]), float(rows[-1][6])


DRIVERS: Mapping[str, Callable[[PeerLoad], Driven]] = {
    driver.__name__: driver for driver in (baton, openvino, vllm, llamacpp, ik_llamacpp, transformers)
}


def main() -> None:
    answers = claim_stdout()
    engine, source, threads, precision, max_batch, max_tokens = sys.argv[1:]
    serve(answers, *DRIVERS[engine](PeerLoad(source, int(threads), precision, int(max_batch), int(max_tokens))))


if __name__ == "__main__":
    main()
