"""The base of all messages, and types that several of them use."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Body(BaseModel):
    """Strict: "5" is no number, and 1 is no truth value. A field that a body does not declare is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True)
class Unserved:
    """The type of a field that other servers have: only null and `neutral` are accepted, since they ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.neutral], "description": f"not served: {self.reason}"}

    def _checked(self, value: Any) -> Any:
        if value is None or any(type(value) is type(each) and value == each for each in self.neutral):
            return value
        but = f", except {json.dumps(self.neutral[0])}" if self.neutral else ""
        raise PydanticCustomError("not_served", "is not served{but}: {reason}", {"but": but, "reason": self.reason})


Count = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenId = int  # the router checks whether it is in the vocabulary
# Lists may be long: the first element that is wrong ends their validation.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
