"""`baton generate` and `baton chat`: their flags."""

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET


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
    best_of: options.BestOf = None,
    beam_width: options.BeamWidth = None,
    length_penalty: options.LengthPenalty = None,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    choice: options.Choice = None,
    echo: options.Echo = False,
    prompt_logprobs: options.PromptLogprobs = None,
    model: options.Model = None,
    timeout: options.TimeoutS = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    target: options.Target = DEFAULT_TARGET,
) -> None:
    """Continue a text as it stands, streaming. A chat model wants `chat` instead.

    With --system the prompt goes through the model's chat template too.
    """
    from baton.cli.ask import generate as run_generate

    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give either a text or --token-ids", param_hint="prompt")
    if token_ids is not None and system is not None:
        raise typer.BadParameter("a system message needs a prompt as text, not --token-ids", param_hint="--system")
    options.check_logprobs(logprobs, json)
    options.check_logprobs(prompt_logprobs, json, "--prompt-logprobs")
    if echo and system is not None:
        raise typer.BadParameter("a chat has no text to echo", param_hint="--echo")
    given = options.sampling_options(context.params)
    asked = token_ids if prompt is None else options.read_prompt(prompt)
    raise typer.Exit(run_generate(target, asked if asked is not None else (), system, given, json, verbose))


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
    best_of: options.BestOf = None,
    beam_width: options.BeamWidth = None,
    length_penalty: options.LengthPenalty = None,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    choice: options.Choice = None,
    model: options.Model = None,
    timeout: options.TimeoutS = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    target: options.Target = DEFAULT_TARGET,
) -> None:
    """Ask the model through its chat template: one message, or without one a conversation.

    In a conversation Ctrl-C cancels the answer, Ctrl-D ends, /help lists the commands. Each line of standard input is a
    message where that is no terminal.
    """
    from baton.cli.ask import chat_loop, chat_once

    options.check_logprobs(logprobs, json)
    given = options.sampling_options(context.params)
    if message is not None:
        raise typer.Exit(chat_once(target, options.read_prompt(message), system, given, json, verbose))
    if json or n is not None:
        raise typer.BadParameter("--json and --n need a message", param_hint="message")
    raise typer.Exit(chat_loop(target, system, given, verbose))
