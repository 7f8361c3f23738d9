"""The commands and their flags. What a command does lies in the module of its name, imported when it is called."""

import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli import options
from cli.devices import DeviceChoice
from cli.errors import CommandFailed
from cli.options import DEFAULT_TARGET

app = typer.Typer(
    name="baton",
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")] = None,
    prefill: Annotated[int, typer.Option(min=1, max=64, help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Number of decode workers.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the public port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65534, help="Public port; 0 takes a free one.")] = 50051,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Admin port, on loopback; default: --port plus 1.")
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="What workers compute on.")] = DeviceChoice.AUTO,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="Of weights and KV. auto: the checkpoint's own, but float32 on a CPU without bf16 arithmetic."
        ),
    ] = "auto",
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens per KV block.")] = 32,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens; default: the model's.")
    ] = None,
    kv_memory: options.KvMemory = None,
    transport: Annotated[
        Literal["auto", "shared_memory", "grpc"], typer.Option(help="How KV goes from prefill to decode.")
    ] = "auto",
    log_format: Annotated[Literal["plain", "json"], typer.Option(help="How the processes log.")] = "plain",
    namespace: Annotated[
        str | None, typer.Option(help="Which cluster on a Redis that several share; default: baton-PORT.")
    ] = None,
    trace_file: Annotated[
        Path | None, typer.Option(help="Where traces are appended; default: a new file in runtime/.")
    ] = None,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until it serves.")] = 600,
) -> None:
    """Start router, workers and Redis on this machine; Ctrl-C drains and stops them."""
    from cli.up import UpOptions, run_up

    code = run_up(
        UpOptions(
            model=model,
            prefill=prefill,
            decode=decode,
            host=host,
            port=port,
            admin_port=admin_port,
            device=device,
            dtype=dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            kv_memory_bytes=kv_memory,
            transport=transport,
            log_format=log_format,
            namespace=namespace,
            trace_file=trace_file,
            startup_timeout_s=startup_timeout,
        )
    )
    raise typer.Exit(code)


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input.")] = None,
    token_ids: options.TokenIds = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    typical_p: options.TypicalP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    min_tokens: options.MinTokens = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    n: options.Choices = None,
    logprobs: options.Logprobs = None,
    model: options.Model = None,
    timeout: options.TimeoutS = None,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
) -> None:
    """Continue a text as it stands, streaming. A chat model wants `chat` instead, or it babbles.

    With --system the prompt is put through the model's chat template too.
    """
    from cli.ask import generate as run_generate

    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give a text or --token-ids, one of them", param_hint="prompt")
    if token_ids is not None and system is not None:
        raise typer.BadParameter("a system message needs a text, not --token-ids", param_hint="--system")
    options.check_logprobs(logprobs, json)
    given = options.sampling_options(context.params)
    asked = token_ids if prompt is None else options.read_prompt(prompt)
    raise typer.Exit(run_generate(target, asked if asked is not None else (), system, given, json))


@app.command()
def chat(
    context: typer.Context,
    message: Annotated[str | None, typer.Argument(help="One message; without it, a conversation.")] = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    typical_p: options.TypicalP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    min_tokens: options.MinTokens = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    n: options.Choices = None,
    logprobs: options.Logprobs = None,
    model: options.Model = None,
    timeout: options.TimeoutS = None,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
) -> None:
    """Talk to the model through its chat template: one message, or a conversation at the terminal."""
    from cli.ask import chat_loop, chat_once

    options.check_logprobs(logprobs, json)
    given = options.sampling_options(context.params)
    if message is not None:
        raise typer.Exit(chat_once(target, options.read_prompt(message), system, given, json))
    if json or n is not None:
        raise typer.BadParameter("--json and --n need a message", param_hint="message")
    raise typer.Exit(chat_loop(target, system, given))


@app.command()
def status(
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Workers, pages and load. Exit code 3 where the router answers but is not ready."""
    from cli.status import show_status

    raise typer.Exit(show_status(admin or options.admin_target_of(target), json))


@app.command()
def health(
    target: options.Target = DEFAULT_TARGET,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 2.0,
) -> None:
    """Whether a process serves (grpc.health.v1): exit code 0 or 1. For health checks of containers."""
    import asyncio

    from cli.readiness import Health, check_health

    found = asyncio.run(check_health(target, timeout))
    print(found.value)
    raise typer.Exit(0 if found is Health.SERVING else 1)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Folder with config.json, or Hugging Face id; no weights are needed.")],
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per request, prompt plus answer; default: the model's positions.")
    ] = None,
    kv_memory: options.KvMemory = None,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], typer.Option(help="Of weights and KV; auto: the model's.")
    ] = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Requests at once; default: one.")] = None,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens per KV block.")] = 32,
    json: options.Json = False,
) -> None:
    """How much memory a model needs and how many requests fit, without loading it."""
    from cli.plan import PlanOptions, run_plan

    raise typer.Exit(run_plan(PlanOptions(model, dtype, block_size, max_model_len, kv_memory, batch), json))


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(help="Requests, one JSON object per line, as for OpenAI's batch API.")],
    target: Annotated[Path, typer.Argument(help="Answers; what is there already is not done again.")],
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of weights and KV.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens.")] = None,
    kv_memory: options.KvMemory = None,
) -> None:
    """Answer a file of requests without a server. Interrupted and run again, it goes on where it was."""
    from cli.batch import BatchOptions, run_batch

    raise typer.Exit(run_batch(BatchOptions(source, target, model, device, dtype, max_model_len, kv_memory)))


@app.command()
def trace(
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many requests, the newest last.")] = 3,
    file: Annotated[str | None, typer.Option(help="Trace file; default: that of the last `baton up`.")] = None,
    json: options.Json = False,
) -> None:
    """Where the time of the last requests went, from the trace file."""
    from cli.trace import show_traces

    raise typer.Exit(show_traces(file, last, json))


# -h and the like are for pytest.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}


@app.command(context_settings=PASS_ON)
def test(context: typer.Context) -> None:
    """Check style and types and run the tests. Arguments go to pytest, which then runs alone."""
    from cli.checks import run_checks

    raise typer.Exit(run_checks(context.args))


@app.command()
def version() -> None:
    """The version of Baton and of what it computes with."""
    for package in ("baton-serve", "torch", "transformers", "grpcio"):
        try:
            found = installed_version(package)
        except PackageNotFoundError:
            # A checkout that runs without an installation, or an image that leaves out what it does not need.
            found = "(not installed)"
        print(f"{package} {found}")


def main() -> None:
    """Entry point of the `baton` script."""
    try:
        app()
    except CommandFailed as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
