"""What a model thinks before it answers, apart from the answer, while it comes. Pure.

Qwen3, DeepSeek-R1, GLM-4.5     <think> thoughts </think> answer

Either the model writes the first tag, or its chat template does, at the end of the prompt; a template may also write
both, so that the model does not think. White space around the tags belongs to neither part.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from baton.text.output.pieces import OutputPiece, Thought, ToolParser, beginning_of

OPEN, CLOSE = "<think>", "</think>"


class ParserState(Enum):
    BEGIN = auto()  # nothing but white space, or a part of the first tag, has come
    THOUGHT = auto()
    ANSWER = auto()


class ThoughtParser:
    """A text that does not begin with a tag has no thoughts; one that has no last tag is all thoughts."""

    def __init__(self, opened: bool) -> None:
        """`opened`: the prompt ends with the first tag."""
        self.at = ParserState.THOUGHT if opened else ParserState.BEGIN
        self._held = ""  # may be a part of a tag, or white space that nothing follows
        self._has_text = False  # of the present part
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
        """What was held back, at the end of the answer."""
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
            self.at, self._has_text = ParserState.ANSWER, True  # its white space is its own

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
    """`template`: its source; `ending`: what its prompts end with. None: its models do not think."""
    if OPEN not in template and CLOSE not in template:
        return None
    opened = ending.rstrip().endswith(OPEN)
    return lambda: ThoughtParser(opened)


class OutputParser:
    """Thoughts first; what follows them is text and calls. `None`: there are none of that kind."""

    def __init__(self, thoughts: ThoughtParser | None, tools: ToolParser | None, shows_thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self._shows_thoughts = shows_thoughts
        self.thought_tokens = 0  # their tags included
        self._unsettled_tokens = 0  # at the beginning, which may become a tag

    @property
    def thinks(self) -> bool:
        """The model may think."""
        return self._thoughts is not None or (self._tools is not None and self._tools.thinks is not None)

    @property
    def calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._tools is None else self._tools.calls

    def push(self, text: str, tokens: int) -> list[OutputPiece]:
        """`tokens`: of which the text is made."""
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
        """The pieces that were held back, at the end of the answer."""
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
