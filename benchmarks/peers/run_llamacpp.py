"""llama.cpp through its C interface, on a GGUF file. Choosing the tokens is not in its times.

python -m baton.benchmarks.peers.run_llamacpp FILE.gguf THREADS PRECISION MAX_BATCH MAX_TOKENS
"""

import sys
from collections.abc import Sequence
from typing import Any

from baton.benchmarks.peers.lines import Round, Stopwatch, Work, claim_stdout, serve

BATCH_TOKENS, COMPUTED_AT_ONCE = 2048, 512  # its own defaults
ROOM_TOKENS = 64  # per sequence: contexts are padded


class Context:
    """Sequences of one shape, whose KV is cleared for every round."""

    def __init__(self, library: Any, model: Any, threads: int, work: Work) -> None:
        self._library = library
        params = library.llama_context_default_params()
        params.n_ctx = work.batch * (work.prompt_tokens + work.new_tokens + ROOM_TOKENS)
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH_TOKENS, COMPUTED_AT_ONCE, work.batch
        params.n_threads = params.n_threads_batch = threads
        self._context = library.llama_init_from_model(model, params)
        self._tokens = library.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, work: Work) -> Round:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        prefill_s, latest = 0.0, []
        for sequence, prompt in enumerate(work.prompts()):
            for start in range(0, len(prompt), BATCH_TOKENS):
                part = prompt[start : start + BATCH_TOKENS]
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
        """Of each token: its id, position, sequence. No logits are wanted yet."""
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


def main() -> None:
    answers = claim_stdout()
    import llama_cpp  # type: ignore[import-not-found]

    path, threads = sys.argv[1], int(sys.argv[2])
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    contexts: dict[tuple[int, int, int], Context] = {}

    def run(work: Work) -> Round:
        shape = (work.batch, work.prompt_tokens, work.new_tokens)
        if shape not in contexts:
            contexts[shape] = Context(llama_cpp, model, threads, work)
        return contexts[shape].run(work)

    serve(answers, llama_cpp.__version__, run)


if __name__ == "__main__":
    main()
