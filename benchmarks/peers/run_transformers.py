"""transformers, its own forward and cache, without a server around.

python -m baton.benchmarks.peers.run_transformers CHECKPOINT THREADS PRECISION MAX_BATCH MAX_TOKENS
"""

import sys

from baton.benchmarks.peers.lines import Round, Stopwatch, Work, claim_stdout, serve


def main() -> None:
    answers = claim_stdout()
    import torch
    import transformers

    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(work: Work) -> Round:
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

    serve(answers, transformers.__version__, run)


if __name__ == "__main__":
    main()
