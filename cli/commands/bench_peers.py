"""`baton bench peers`: its flags."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.options import read_sizes

DEFAULT_FOLDER = Path("~/.cache/baton/peers")


def peers(
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=4, help="Decode steps of each round.")] = 48,
    batch: Annotated[str, typer.Option(help="Sequences at once; several sizes: 1,16.")] = "1,16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: the cores that this process may use.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the engines take turns in each.")] = 7,
    precision: Annotated[
        Literal["bf16", "int8", "int4", "all"], typer.Option(help="Precision of weights and products.")
    ] = "all",
    only: Annotated[list[str] | None, typer.Option(help="Name of a peer, such as llama.cpp; may be repeated.")] = None,
    peers_folder: Annotated[
        Path, typer.Option(help="Folder of the peers and of converted checkpoints.")
    ] = DEFAULT_FOLDER,
    setup: Annotated[bool, typer.Option("--setup", help="Install the peers into that folder and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="All rounds as JSON instead of a table.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the ratios, as SVG, into this file.")] = None,
) -> None:
    """The same work on Baton's engine and on OpenVINO, vLLM, llama.cpp and transformers, in turns, on this CPU.

    A peer that is not installed is absent from the comparison. Compare within one run only.
    """
    from cli.bench.peers import PeersOptions, run_peers_bench
    from cli.bench.peers_known import PEERS, Precision
    from cli.bench.peers_setup import run_peers_setup

    known = [peer.name for peer in PEERS if peer.environment is not None]
    for name in only or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--only")
    folder = peers_folder.expanduser().absolute()
    if setup:
        raise typer.Exit(run_peers_setup(folder, only or ()))
    asked = PeersOptions(
        model=model,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        batches=read_sizes(batch, "--batch"),
        threads=threads or len(os.sched_getaffinity(0)),
        rounds=rounds,
        precisions=tuple(Precision) if precision == "all" else (Precision(precision),),
        folder=folder,
        only=tuple(only or ()),
    )
    raise typer.Exit(run_peers_bench(asked, json, picture))
