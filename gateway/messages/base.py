"""What all messages have in common, and types that several of them use."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Strict: "5" is no number, and 1 is no truth value."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


Count = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenId = int  # in the vocabulary or not: that the router says
# Lists may be long: the first element that is wrong ends their validation.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
