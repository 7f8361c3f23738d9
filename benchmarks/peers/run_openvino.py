"""OpenVINO GenAI: its continuous batching, on a checkpoint that optimum-intel has exported.

    python -m baton.benchmarks.peers.run_openvino EXPORTED THREADS PRECISION MAX_BATCH MAX_TOKENS

bf16: products, KV and activations all in bf16; where the CPU has no instructions for bf16, weights in fp16 and all else
in fp32, since its attention takes nothing else there (its version says so then). int8 and int4: its own defaults for
such weights, which are activations and KV in 8 bits.
"""

import sys
from typing import Any

from baton.benchmarks.peers.lines import Round, Stopwatch, Work, claim_stdout, serve

STEP_TOKENS = 2048
KV_GIB = 4
PLAIN = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}  # else it quantises activations
BF16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", **PLAIN}
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", **PLAIN}


def main() -> None:
    answers = claim_stdout()
    import numpy
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    folder, threads, precision, max_batch = sys.argv[1:5]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_GIB
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = int(max_batch)
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    version = openvino_genai.__version__.partition("-")[0]
    properties: dict[str, str] = {}
    if precision == "bf16":
        has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        properties, version = (BF16, version) if has_bf16 else (F32, f"{version} in f32")
    properties = {"INFERENCE_NUM_THREADS": threads, **properties}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    numbers = iter(range(1 << 40))

    def add(prompts: list[list[int]], new_tokens: int) -> list[Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        return [pipeline.add_request(next(numbers), tensor, config) for tensor in tensors]

    def run(work: Work) -> Round:
        handles = add(work.prompts(), 1)
        watch = Stopwatch()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        prefill_s = watch.lap()
        first_tokens = [handle.read_all()[0].generated_ids[0] for handle in handles]
        handles = add(work.prompts(), work.new_tokens + work.batch)  # the first to begin goes on until all have begun
        waiting = set(range(work.batch))
        steps_s: list[float] = []
        watch.lap()
        while pipeline.has_non_finished_requests():
            pipeline.step()
            step_s = watch.lap()
            if not waiting:
                steps_s.append(step_s)
            waiting = {index for index in waiting if not handles[index].can_read()}
            watch.lap()
        return Round(prefill_s, steps_s[: work.new_tokens], first_tokens)

    serve(answers, version, run)


if __name__ == "__main__":
    main()
