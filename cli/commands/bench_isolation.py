"""`baton bench isolation`: its flags."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from cli import options


def isolation(
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")] = None,
    quantize: options.Quantize = "none",
    variants: Annotated[
        str, typer.Option(help="Any of 1p1d, colocated, vllm; measured in this order.")
    ] = "1p1d,colocated",
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM for CPUs; adds vllm to --variants.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, help="Measured seconds of each phase.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the variants take turns in each.")] = 5,
    answers: Annotated[int, typer.Option(min=1, help="Long answers at once.")] = 4,
    answer_prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of each long answer.")] = 64,
    answer_tokens: Annotated[
        int, typer.Option(min=16, help="Most tokens of each long answer, which must outlast the phases.")
    ] = 4096,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt sent beside the answers.")] = 1024,
    prompts_per_s: Annotated[float, typer.Option(min=0.01, help="Prompts per second in the paced phase.")] = 1.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Prompts at a time in the saturated phase.")] = 3,
    slo_tbt_ms: Annotated[float, typer.Option(min=0.1, help="TBT objective: a later token is not in time.")] = 50.0,
    slo_ttft_ms: Annotated[
        float, typer.Option(min=0.1, help="TTFT objective: a later first token is not in time.")
    ] = 2000.0,
    up_flags: Annotated[str, typer.Option(help="More flags for `baton up`, as one text.")] = "",
    picture: Annotated[Path | None, typer.Option(help="File for a picture (SVG) of p99 TBT.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One object, with every round, instead of a table.")] = False,
) -> None:
    """How much prompts disturb running answers: time between tokens with and without them.

    Starts and ends the servers itself. Needs two cores, and a machine with nothing else to do.
    """
    from cli.bench.isolation import IsolationOptions, Variant, run_isolation_bench
    from cli.bench.isolation_figures import Objectives
    from cli.bench.isolation_load import Load

    try:
        chosen = [Variant(name.strip()) for name in variants.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--variants") from error
    if vllm_python is not None and Variant.VLLM not in chosen:
        chosen.append(Variant.VLLM)
    if vllm_python is None and Variant.VLLM in chosen:
        raise typer.BadParameter("vllm needs --vllm-python", param_hint="--variants")
    load = Load(seconds, answers, answer_prompt_tokens, answer_tokens, prompt_tokens, prompts_per_s, in_flight)
    asked = IsolationOptions(
        model,
        quantize,
        tuple(dict.fromkeys(chosen)),
        rounds,
        load,
        Objectives(slo_ttft_ms, slo_tbt_ms),
        vllm_python,
        picture,
        tuple(shlex.split(up_flags)),
    )
    raise typer.Exit(run_isolation_bench(asked, json))
