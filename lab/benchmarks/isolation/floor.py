"""Compute only the matrix products of a prefill worker, to measure what another core's arithmetic costs decode.

    .venv/bin/python -m baton.lab.benchmarks.isolation.floor --model FOLDER --rows 512 --ready FILE

Runs until it is killed. Weights and kernels are the engine's; inputs are random. Creates FILE once it computes.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine.load import load_model
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.feed_forward import Gated
from baton.engine.prepare import ModelOptions, resolve_dtype
from baton.process.affinity import lower_priority


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--rows", type=int, default=512, help="rows of each product: the tokens of a prefill step")
    parser.add_argument("--nice", type=int, default=0, help="niceness of this process")
    parser.add_argument("--ready", type=Path, required=True)
    arguments = parser.parse_args()
    os.nice(arguments.nice)
    lower_priority(arguments.nice)
    torch.set_num_threads(1)
    options = ModelOptions(
        arguments.model, torch.device("cpu"), arguments.dtype, 32, 0, None, quantize=arguments.quantize
    )
    dtype = resolve_dtype(options)
    model = load_model(options.folder, dtype, options.device, progress=False, quantize=options.quantize, packed=True)
    if not isinstance(model, DecoderModel):
        raise SystemExit(f"{arguments.model}: only models with Baton's own decoder are supported")
    with torch.inference_mode():
        run = products(model, arguments.rows)
        run()
        arguments.ready.touch()
        while True:
            run()


def products(model: DecoderModel, rows: int) -> Callable[[], None]:
    """Return a function that computes all projections of all layers once. Raises: TypeError for a feed-forward without
    gate.
    """
    config = model.config
    hidden = torch.randn(rows, config.hidden_size, dtype=model.dtype)
    attended = torch.randn(rows, config.num_heads * config.head_dim, dtype=model.dtype)
    inner = torch.randn(rows, config.intermediate_size, dtype=model.dtype)

    def run() -> None:
        for layer in model.layers:
            feed_forward = layer.feed_forward
            if not isinstance(feed_forward, Gated) or layer.qkv is None or layer.output is None:
                raise TypeError("experts, and layers of one part, are not supported: routing needs real inputs")
            layer.qkv(hidden)
            layer.output(attended)
            feed_forward.gate_up(hidden)
            feed_forward.down(inner)

    return run


if __name__ == "__main__":
    main()
