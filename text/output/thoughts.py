"""Reasoning that precedes an answer, separated while it streams. Pure.

Qwen3, DeepSeek-R1, GLM-4.5     <think> reasoning </think> answer

The model writes the opening tag, or its chat template does at the end of the prompt. A template may also write both
tags, so that the model does not reason. White space around the tags belongs neither to reasoning nor to answer.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from baton.text.output.pieces import OutputPiece, Thought, ToolParser, beginning_of

OPEN, CLOSE = "<think>", "</think>"


class ParserState(Enum):
    BEGIN = auto()  # the text so far is white space or a part of the opening tag
    THOUGHT = auto()
    ANSWER = auto()


class ThoughtParser:
    """Parser of one answer. Without an opening tag, the answer has no reasoning; without a closing tag, no text."""

    def __init__(self, opened: bool) -> None:
        """Start the parser. `opened`: the prompt ends with the opening tag, so the answer begins with reasoning."""
        self.at = ParserState.THOUGHT if opened else ParserState.BEGIN
        self._held = ""  # possible part of a tag, or trailing white space
        self._has_text = False  # whether the current part, reasoning or answer, has text
        self.has_thought = opened

    def push(self, text: str) -> list[str | Thought]:
        self._held += text
        pieces = list[str | Thought]()
        if self.at is ParserState.BEGIN:
            self._begin()
        if self.at is ParserState.THOUGHT:
            pieces += self._think()
        if self.at is ParserState.ANSWER:
            pieces += self._answer()
        return pieces

    def finish(self) -> list[str | Thought]:
        """Return the withheld text at the end of the answer."""
        held, self._held = self._held, ""
        if self.at is ParserState.THOUGHT:
            rest = held.rstrip() if self._has_text else held.strip()
            return [Thought(rest)] if rest else []
        return [held] if held and (self.at is ParserState.BEGIN or self._has_text) else []

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self.at, self._held, self.has_thought = ParserState.THOUGHT, begun[len(OPEN) :], True
        elif begun and not OPEN.startswith(begun):
            self.at, self._has_text = ParserState.ANSWER, True  # keeps leading white space

    def _think(self) -> list[str | Thought]:
        thought, tag, rest = self._held.partition(CLOSE)
        if tag:
            self.at, self._held = ParserState.ANSWER, rest
            certain = thought.rstrip()
        else:
            certain = thought[: len(thought) - beginning_of(CLOSE, thought)].rstrip()
            self._held = thought[len(certain) :]
        if not self._has_text:
            certain = certain.lstrip()
        self._has_text = not tag and (self._has_text or bool(certain))
        return [Thought(certain)] if certain else []

    def _answer(self) -> list[str | Thought]:
        answer, self._held = self._held if self._has_text else self._held.lstrip(), ""
        self._has_text = self._has_text or bool(answer)
        return [answer] if answer else []


def thoughts_of(template: str, ending: str) -> Callable[[], ThoughtParser] | None:
    """Return a function that creates parsers for a model's answers; None if the model does not reason.

    `template`: source of the chat template. `ending`: end of the prompts that it renders.
    """
    if OPEN not in template and CLOSE not in template:
        return None
    opened = ending.rstrip().endswith(OPEN)
    return lambda: ThoughtParser(opened)


class OutputParser:
    """Parser of an answer. `thoughts` parses the reasoning, `tools` the text and calls after it. Both may be None."""

    def __init__(self, thoughts: ThoughtParser | None, tools: ToolParser | None, shows_thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self._shows_thoughts = shows_thoughts
        self.thought_tokens = 0  # number of reasoning tokens, including tags
        self._unsettled_tokens = 0  # number of first tokens that may still be part of the opening tag

    @property
    def thinks(self) -> bool:
        """Return whether the model may reason."""
        return self._thoughts is not None or (self._tools is not None and self._tools.thinks is not None)

    @property
    def calls(self) -> int:
        return 0 if self._tools is None else self._tools.calls

    def push(self, text: str, tokens: int) -> list[OutputPiece]:
        """Return the pieces completed by a text of `tokens` tokens."""
        if self._thoughts is None:
            thought = self._tools is not None and self._tools.thinks
            pieces = self._tell(text)
            if thought or (self._tools is not None and self._tools.thinks):
                self.thought_tokens += tokens
            return pieces
        was = self._thoughts.at
        pieces = self._apart(self._thoughts.push(text))
        if was is not ParserState.ANSWER:
            self._unsettled_tokens += tokens
        if self._thoughts.at is not ParserState.BEGIN:
            self.thought_tokens += self._unsettled_tokens if self._thoughts.has_thought else 0
            self._unsettled_tokens = 0
        return pieces

    def finish(self) -> list[OutputPiece]:
        """Return the withheld pieces at the end of the answer."""
        pieces = [] if self._thoughts is None else self._apart(self._thoughts.finish())
        return [*pieces, *self._shown(self._tools.finish())] if self._tools is not None else pieces

    def _apart(self, parts: list[str | Thought]) -> list[OutputPiece]:
        pieces = list[OutputPiece]()
        for part in parts:
            if isinstance(part, str):
                pieces += self._tell(part)
            elif self._shows_thoughts:
                pieces.append(part)
        return pieces

    def _tell(self, text: str) -> list[OutputPiece]:
        if self._tools is not None:
            return self._shown(self._tools.push(text))
        return [text] if text else []

    def _shown(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        return [piece for piece in pieces if self._shows_thoughts or not isinstance(piece, Thought)]


MakeParser = Callable[[], OutputParser]
