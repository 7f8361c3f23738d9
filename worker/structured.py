"""Forms of answers as session messages have them, compiled off the event loop."""

import asyncio

from baton.engine.sampling.constraint import Constraint, Grammars
from baton.generation.structured.library import LibraryMissing
from baton.generation.structured.output import StructuredKind, StructuredOutput
from baton.protos import sampling_pb2

KINDS = {
    sampling_pb2.STRUCTURED_KIND_JSON_SCHEMA: StructuredKind.JSON_SCHEMA,
    sampling_pb2.STRUCTURED_KIND_JSON_OBJECT: StructuredKind.JSON_OBJECT,
    sampling_pb2.STRUCTURED_KIND_REGEX: StructuredKind.REGEX,
    sampling_pb2.STRUCTURED_KIND_GRAMMAR: StructuredKind.GRAMMAR,
    sampling_pb2.STRUCTURED_KIND_CHOICE: StructuredKind.CHOICE,
}


async def constraint_of(grammars: Grammars | None, sampling: sampling_pb2.Sampling) -> Constraint | None:
    """None where any answer will do. Raises: ValueError, with the field's name."""
    if not sampling.HasField("structured"):
        return None
    kind = KINDS.get(sampling.structured.kind)
    if kind is None or grammars is None:
        raise ValueError("structured: this worker does not support this kind of structured output")
    asked = StructuredOutput(kind, sampling.structured.text)
    try:
        return await asyncio.to_thread(grammars.constraint, asked, tuple(sampling.stop_token_ids))
    except (ValueError, LibraryMissing) as error:
        raise ValueError(f"{kind.value}: {error}") from error
