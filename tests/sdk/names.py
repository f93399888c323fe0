"""Writes names.json: the names that the newest OpenAI and Anthropic SDKs know, for the tests of requests.

    pip install openai anthropic && python tests/sdk/names.py

`fields` has the fields of the requests of each API. `parts` has one example of each type of content part, block or
item of a conversation, with its required fields only.
"""

import importlib.metadata
import json
import pathlib
import typing

import typing_extensions
from anthropic.types import MessageParam, message_create_params
from anthropic.types.beta import BetaMessageParam
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import ResponseInputItemParam, response_create_params

# Arguments of the Anthropic SDK that it sends as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
# A type has at most this depth in an example; deeper optional values are left out.
DEPTH = 6


def fields(*requests):
    names = {name for request in requests for name in typing.get_type_hints(request)}
    return sorted(names - HEADERS)


def alternatives(kind):
    """The types of a union, or the type itself."""
    origin = typing.get_origin(kind)
    if origin in (typing_extensions.Annotated, typing_extensions.Required, typing_extensions.NotRequired):
        return alternatives(typing.get_args(kind)[0])
    if origin is typing.Union:
        return [one for inner in typing.get_args(kind) for one in alternatives(inner)]
    return [kind]


def example(kind, depth=0):
    """A value of a type."""
    kind = alternatives(kind)[0]
    if typing.get_origin(kind) is typing_extensions.Literal:
        return typing.get_args(kind)[0]
    if typing_extensions.is_typeddict(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        required = (typing.Required, typing_extensions.Required)
        names = sorted(name for name in hints if typing.get_origin(hints[name]) in required)
        return {name: example(hints[name], depth + 1) for name in names}
    arguments = typing.get_args(kind)
    if arguments and typing.get_origin(kind) is not dict:
        return [example(arguments[0], depth + 1)] if depth < DEPTH else []
    return {str: "x", int: 1, float: 1.0, bool: True}.get(kind, {})


def parts(*kinds):
    """Examples of all types with a `type` that can stand in these, by their type."""
    found = {}
    seen = set()

    def visit(kind):
        if typing_extensions.is_typeddict(kind):
            if kind in seen:
                return
            seen.add(kind)
            hints = typing.get_type_hints(kind)
            for name in {"content", "output", "tool_calls", "role"} & set(hints):
                visit(hints[name])
            if "type" in hints and "role" not in hints:
                value = example(kind)
                found.setdefault(value.get("type", example(hints["type"])), value)
            return
        for inner in typing.get_args(kind):
            visit(inner)

    for kind in kinds:
        visit(kind)
    return [found[name] for name in sorted(found)]


NAMES = {
    "versions": {name: importlib.metadata.version(name) for name in ("anthropic", "openai")},
    "fields": {
        "chat": fields(*chat_create_params.CompletionCreateParams.__args__),
        "completions": fields(*completion_create_params.CompletionCreateParams.__args__),
        "responses": fields(*response_create_params.ResponseCreateParams.__args__),
        "messages": fields(*message_create_params.MessageCreateParams.__args__,
                           *beta_message_create_params.MessageCreateParams.__args__),
    },
    "parts": {
        "chat": parts(ChatCompletionMessageParam),
        "responses": parts(ResponseInputItemParam),
        "messages": parts(MessageParam, BetaMessageParam),
    },
}


def lines(examples):
    return ",\n".join("      " + json.dumps(one) for one in examples)


def text(names):
    """JSON with one example in a line."""
    kinds = ",\n".join(f'    "{api}": [\n{lines(examples)}\n    ]' for api, examples in names["parts"].items())
    named = ",\n".join(f'    "{api}": {json.dumps(known)}' for api, known in names["fields"].items())
    return (f'{{\n  "versions": {json.dumps(names["versions"])},\n  "fields": {{\n{named}\n  }},\n'
            f'  "parts": {{\n{kinds}\n  }}\n}}\n')


path = pathlib.Path(__file__).parent / "names.json"
path.write_text(text(NAMES))
json.loads(path.read_text())
