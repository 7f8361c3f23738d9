"""Flags of `baton generate` and `baton chat`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from baton.cli.options import DEFAULT_TARGET, Json, Target, TokenIdList, checked, flags_of, read_prompt, read_token_ids

if TYPE_CHECKING:
    from baton.client import GenerateOptions


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling flags, named like the client's options."""

    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens per choice.")] = None
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this sum; in (0, 1].")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = None
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens with at least this fraction of the highest probability.")
    ] = None
    typical_p: Annotated[float | None, typer.Option(help="Keep the most typical tokens up to this sum; in (0, 1].")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Penalty on tokens of prompt and answer, in (0, 10]; above 1 discourages them."),
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Penalty on tokens that are in the answer, in [-2, 2].")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Penalty per occurrence in the answer, in [-2, 2].")
    ] = None
    min_tokens: Annotated[int | None, typer.Option(help="Minimum number of tokens per choice.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed; equal seeds give equal answers.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None
    stop_token_ids: Annotated[
        TokenIdList | None,
        typer.Option(parser=checked(read_token_ids), metavar="2,7,...", help="Token ids that end the answer."),
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the model's end of sequence.")] = False
    n: Annotated[int | None, typer.Option("--n", help="Number of choices.")] = None
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of each token and of the N most likely, N from 0 to 20."),
    ] = None
    best_of: Annotated[
        int | None, typer.Option(help="Generate N choices and show the --n likeliest per token at the end.")
    ] = None
    beam_width: Annotated[
        int | None, typer.Option(help="Beam search with N beams; shows the --n best sequences at the end.")
    ] = None
    length_penalty: Annotated[
        float | None, typer.Option(help="Length penalty of beam search; above 0 favours long answers.")
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with a JSON schema that the answer meets."),
    ] = None
    json_object: Annotated[bool | None, typer.Option("--json-object", help="Answer with a JSON object.")] = None
    regex: Annotated[str | None, typer.Option(help="Regular expression that the complete answer matches.")] = None
    grammar: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with a Lark grammar; the answer is derived from `start`."),
    ] = None
    choice: Annotated[list[str] | None, typer.Option(help="Text that the answer may be; may be repeated.")] = None
    model: Annotated[str | None, typer.Option(help="Name of the model or of an adapter; default: the model.")] = None
    session_id: Annotated[str | None, typer.Option(help="Conversation of this turn, whose KV is kept.")] = None
    keep_for_s: Annotated[
        float | None, typer.Option("--keep-for", help="Seconds within which the next turn is expected.")
    ] = None
    done: Annotated[bool, typer.Option("--done", help="Last turn of the session: its KV may be evicted.")] = False
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds for the complete answer.")] = None


@dataclass(frozen=True, kw_only=True)
class EchoedSampling(SamplingFlags):
    """Sampling flags of `baton generate`, which can also echo the prompt."""

    echo: Annotated[
        bool, typer.Option("--echo", help="Start the answer with the prompt; --logprobs then covers both.")
    ] = False
    prompt_logprobs: Annotated[int | None, typer.Option(help="With --json: the same for the prompt; from 0 to 20.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """Flags for sending a question and for printing the answer."""

    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None
    json: Json = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print TTFT, tokens per second, cached prompt tokens and id on stderr."),
    ] = False
    target: Target = DEFAULT_TARGET


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(AnswerFlags, EchoedSampling):
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input.")] = None
    token_ids: Annotated[
        TokenIdList | None,
        typer.Option(parser=checked(read_token_ids), metavar="5,17,...", help="Token ids instead of a text."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ChatFlags(AnswerFlags, SamplingFlags):
    message: Annotated[str | None, typer.Argument(help="Message; default: a conversation.")] = None


@flags_of
def generate(flags: GenerateFlags) -> None:
    """Continue a text without a chat template. A chat model wants `chat` instead.

    With --system the prompt goes through the chat template.
    """
    from baton.cli.ask import generate as run_generate

    prompt, token_ids, system = flags.prompt, flags.token_ids, flags.system
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give either a text or --token-ids", param_hint="prompt")
    if token_ids is not None and system is not None:
        raise typer.BadParameter("a system message needs a prompt as text, not --token-ids", param_hint="--system")
    _check_logprobs(flags.logprobs, flags.json)
    _check_logprobs(flags.prompt_logprobs, flags.json, "--prompt-logprobs")
    if flags.echo and system is not None:
        raise typer.BadParameter("a chat has no text to echo", param_hint="--echo")
    asked = token_ids or () if prompt is None else read_prompt(prompt)
    given = _given(flags, EchoedSampling)
    raise typer.Exit(run_generate(flags.target, asked, system, given, flags.json, flags.verbose))


@flags_of
def chat(flags: ChatFlags) -> None:
    """Send a message through the chat template, or hold a conversation.

    In a conversation Ctrl-C cancels the answer, Ctrl-D ends, /help lists the commands. Without a terminal, each line of
    standard input is a message.
    """
    from baton.cli.ask import chat_loop, chat_once

    _check_logprobs(flags.logprobs, flags.json)
    target, system, given = flags.target, flags.system, _given(flags, SamplingFlags)
    if flags.message is not None:
        message = read_prompt(flags.message)
        raise typer.Exit(chat_once(target, message, system, given, flags.json, flags.verbose))
    if flags.json or flags.n is not None:
        raise typer.BadParameter("--json and --n need a message", param_hint="message")
    raise typer.Exit(chat_loop(target, system, given, flags.verbose))


def _given(flags: SamplingFlags, names: type[SamplingFlags]) -> "GenerateOptions":
    """Return the options that were given. For the others, the model's defaults apply."""
    given: dict[str, Any] = {}
    for name in (each.name for each in fields(names)):
        value = getattr(flags, name)
        if isinstance(value, Path):
            given[name] = value.read_text(encoding="utf-8")
        elif value is not None and value is not False and value != []:
            given[name] = value
    return cast("GenerateOptions", given)


def _check_logprobs(logprobs: int | None, json: bool, flag: str = "--logprobs") -> None:
    """Check that log-probabilities are requested only with --json. Raises: typer.BadParameter."""
    if logprobs is not None and not json:
        raise typer.BadParameter("needs --json, which shows them", param_hint=flag)
