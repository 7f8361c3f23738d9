"""Baton's own engine, as `./baton bench engine` measures it, behind the lines of a peer.

python -m baton.benchmarks.peers.run_baton CHECKPOINT THREADS PRECISION MAX_BATCH MAX_TOKENS
"""

import sys
from importlib.metadata import version
from pathlib import Path

from baton.benchmarks.peers.lines import Round, Work, claim_stdout, serve


def main() -> None:
    answers = claim_stdout()
    import torch

    from baton.benchmarks.engine.speed import EngineRun, EngineSetup, load_engine
    from baton.engine.models.packed import packs

    folder, threads, precision, max_batch, max_tokens = sys.argv[1:]
    torch.set_num_threads(int(threads))
    quantize = "none" if precision == "bf16" else precision
    setup = EngineSetup(Path(folder), "bfloat16", quantize, "auto", int(max_batch), int(max_tokens))
    loaded = load_engine(setup)
    runs: dict[int, EngineRun] = {}

    def run(work: Work) -> Round:
        engine = runs.setdefault(work.batch, EngineRun(loaded, work.batch))
        prompts = work.prompts()
        prefill_s = engine.prefill_s(prompts)
        first_tokens = engine.first_tokens
        return Round(prefill_s, engine.decode_steps_s(prompts, work.new_tokens), first_tokens)

    kernels = "native" if packs(loaded.prepared.options.device) else "PyTorch"
    serve(answers, f"{version('baton-serve')}, {kernels}", run)


if __name__ == "__main__":
    main()
