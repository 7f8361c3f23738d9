"""vLLM on CPU, its engine stepped in this process.

python -m baton.benchmarks.peers.run_vllm CHECKPOINT THREADS PRECISION MAX_BATCH MAX_TOKENS
"""

import os
import sys

from baton.benchmarks.peers.lines import Round, Stopwatch, Work, claim_stdout, serve

STEP_TOKENS = 2048
KV_GIB = 4


def main() -> None:
    answers = claim_stdout()
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])]))
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import vllm  # type: ignore[import-not-found]

    folder, max_batch, max_tokens = sys.argv[1], int(sys.argv[4]), int(sys.argv[5])
    llm = vllm.LLM(
        folder,
        dtype="bfloat16",
        max_model_len=max_tokens,
        max_num_seqs=max_batch,
        max_num_batched_tokens=max(STEP_TOKENS, max_tokens),
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    numbers = iter(range(1 << 40))

    def add(work: Work, new_tokens: int) -> list[str]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        names = [str(next(numbers)) for _ in range(work.batch)]
        for name, prompt in zip(names, work.prompts(), strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return names

    def run(work: Work) -> Round:
        names = add(work, 1)
        first: dict[str, int] = {}
        watch = Stopwatch()
        while engine.has_unfinished_requests():
            for output in engine.step():
                first[output.request_id] = output.outputs[0].token_ids[0]
        prefill_s = watch.lap()
        first_tokens = [first[name] for name in names]
        waiting = set(add(work, work.new_tokens + work.batch))  # the first to begin goes on until all have begun
        steps_s: list[float] = []
        watch.lap()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            step_s = watch.lap()
            if not waiting:
                steps_s.append(step_s)
            waiting -= {output.request_id for output in outputs}
            watch.lap()
        return Round(prefill_s, steps_s[: work.new_tokens], first_tokens)

    serve(answers, vllm.__version__, run)


if __name__ == "__main__":
    main()
