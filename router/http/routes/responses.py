"""Routes under /v1/responses: OpenAI's Responses API, which uses the router's chats, and stored responses."""

from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Scope

from baton.router.dispatcher import Dispatcher
from baton.router.http.answers import collect, created_now
from baton.router.http.edge.endpoint import caller_of
from baton.router.http.edge.exchange import Reply, json_reply
from baton.router.http.edge.problem import Problem, refused
from baton.router.http.requests import HttpCall, chat_request, names_of
from baton.router.http.responses.answer import ResponseWriter, response_usage
from baton.router.http.responses.bodies import CompactRequest, ResponseRequest
from baton.router.http.responses.compaction import MAX_SUMMARY_TOKENS, PROMPT, compacted
from baton.router.http.responses.items import Item, given_items
from baton.router.http.responses.request import chat_of
from baton.router.http.responses.store import ResponseStore, StoredResponse
from baton.router.http.responses.tools import tool_grammars
from baton.router.http.routes.chat import whole_message
from baton.router.types.response import AnswerId

MAX_LISTED, DEFAULT_LISTED = 100, 20
LIST_PARAMETERS: dict[str, dict[str, Any]] = {
    "after": {"type": "string", "description": "id of the item after which the list starts"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
}
"""Schemas of the query parameters of a list of items, for the OpenAPI document."""


class ResponseRoutes:
    """Handlers of the routes that create, read and delete responses."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(self, dispatcher: Dispatcher, message: ResponseRequest, call: HttpCall) -> Reply:
        """Answer a request for a response, and store the response. Raises: Problem, BatonError."""
        tokenizer = (await dispatcher.choose(message.model or "")).served.tokenizer
        request_id, tenant = message.request_id or call.request_id, call.caller.tenant
        items = await self._conversation(message, request_id, call)
        read = await chat_request(chat_of(message, items, call), call, tokenizer, grammars=tool_grammars(message))
        is_kept = self._is_kept(message, items)

        async def keep(response: ResponseWriter) -> None:
            if response.is_kept:
                response.is_kept = await self._store.put(tenant, StoredResponse(response.complete(), items))

        response = ResponseWriter(message, request_id, read.reader(), is_kept, keep)
        events = dispatcher.answer(read.request, None, call.trace, reader=call.reader)
        return await response.reply(events, message.stream, names_of(message))

    async def compact(self, dispatcher: Dispatcher, message: CompactRequest, call: HttpCall) -> Reply:
        """Replace a conversation by the user's messages and a summary of all. Raises: Problem, BatonError."""
        tokenizer = (await dispatcher.choose(message.model or "")).served.tokenizer
        request_id = message.request_id or call.request_id
        items = await self._conversation(message, request_id, call)
        if not items:
            raise refused("input", "is empty; send the conversation, or previous_response_id")
        limit = message.max_output_tokens or MAX_SUMMARY_TOKENS
        asked = message.model_copy(update={"tool_choice": "none", "text": None, "max_output_tokens": limit})
        prompt = given_items(PROMPT, request_id)
        read = await chat_request(chat_of(asked, [*items, *prompt], call), call, tokenizer)
        whole = await collect(dispatcher.answer(read.request, None, call.trace, reader=call.reader))
        [choice], parser = whole.choices, read.reader()
        summary = whole_message(zip(choice.texts, choice.tokens, strict=True), parser)["content"]
        if not summary:
            raise Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the model wrote no summary", code="no_summary")
        return json_reply(
            {
                "id": f"{AnswerId.RESPONSE}{request_id}",
                "object": "response.compaction",
                "created_at": created_now(),
                "output": compacted(items, f"cmp_{request_id}", summary),
                "usage": response_usage(whole.usage, parser.thought_tokens),
            }
        )

    async def _conversation(self, message: ResponseRequest, request_id: str, call: HttpCall) -> list[Item]:
        """Return the items of an earlier response, if one is named, and those of the input. Raises: Problem."""
        items = given_items(message.input, request_id)
        if message.previous_response_id is None:
            return items
        before = await self._store.get(call.caller.tenant, message.previous_response_id, "previous_response_id")
        return [*before.conversation, *items]

    def _is_kept(self, message: ResponseRequest, items: list[Item]) -> bool:
        """Return whether the response will be stored. Raises: Problem if `store` is true but storing is impossible."""
        if message.store is False:
            return False
        reason = self._store.refuses(items)
        if reason is not None and message.store:
            raise refused("store", reason, "response_not_stored")
        return reason is None

    async def one(self, scope: Scope) -> Reply:
        """Answer GET or DELETE of the response named in the path. Raises: Problem."""
        tenant, name = caller_of(scope).tenant, scope["path_params"]["response_id"]
        if scope["method"] != "DELETE":
            return json_reply((await self._store.get(tenant, name)).response)
        await self._store.delete(tenant, name)
        return json_reply({"id": name, "object": "response", "deleted": True})

    async def input_items(self, scope: Scope) -> Reply:
        """List the items that a response answers: its input and the conversation before it. Raises: Problem."""
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        order, limit, after = query.get("order", "desc"), limit_of(query.get("limit")), query.get("after")
        if order not in ("asc", "desc"):
            raise refused("order", "must be asc or desc")
        kept = await self._store.get(caller_of(scope).tenant, scope["path_params"]["response_id"])
        items = list(kept.items) if order == "asc" else list(kept.items)[::-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise Problem(HTTPStatus.NOT_FOUND, f"after: unknown item {after[:64]!r}", "after", "item_not_found")
            items = items[places[0] + 1 :]
        shown = items[:limit]
        ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
        return json_reply({"object": "list", "data": shown, **ends, "has_more": len(items) > limit})


def limit_of(given: str | None, default: int = DEFAULT_LISTED, most: int = MAX_LISTED) -> int:
    """Return the requested maximum number of listed objects. Raises: Problem."""
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(most)) and 1 <= int(given) <= most):
        raise refused("limit", f"must be from 1 to {most}")
    return int(given)
