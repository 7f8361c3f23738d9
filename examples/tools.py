"""Tool calls over gRPC, streamed: reasoning, text and calls are separate events. Needs a running `./baton up`:

.venv/bin/python examples/tools.py
"""

import json
import sys

from baton import BatonClient
from baton.client import CallBegins, CallPart, Delta, Event, Message, ThoughtPart, Tool
from baton.client.answer import completion_from

AGES = {"Vera Stone": 34, "Maria Garcia": 51}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LOOKUP = Tool("lookup", "Looks a person up.", NAME)


def shown(event: Event) -> str:
    match event:
        case Delta(text=text) | ThoughtPart(text=text):
            return text
        case CallBegins(name=name):
            return f"\n{name} "
        case CallPart(arguments=arguments):
            return arguments
    return ""


def main() -> None:
    messages = [Message("user", "How old is Vera Stone?")]
    with BatonClient("127.0.0.1:50051") as baton:
        while True:
            events: list[Event] = []
            for event in baton.chat(messages, tools=[LOOKUP], temperature=0, max_tokens=90):
                events.append(event)
                sys.stdout.write(shown(event))
                sys.stdout.flush()
            answer = completion_from(events)
            sys.stdout.write("\n")
            if not answer.calls:
                return
            results = [json.dumps({"age": AGES.get(call.values["name"])}) for call in answer.calls]
            calls = zip(answer.calls, results, strict=True)
            messages += [answer.message, *(call.result(result) for call, result in calls)]


if __name__ == "__main__":
    main()
