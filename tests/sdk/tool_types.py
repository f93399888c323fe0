"""Sends each type of tool that OpenAI's and Anthropic's SDKs know to a running server with the demo model.

    python tool_types.py http://127.0.0.1:5413/v1

A new type in a new version of an SDK is sent, too. Messages has tools that the client runs, which the server accepts, and
tools that Anthropic's servers run, which it refuses. Responses ignores all types but functions.
"""

import re
import sys
import typing

import anthropic
import openai
import typing_extensions
from anthropic.types.beta import BetaToolUnionParam
from openai.types.responses import ToolParam

BASE = sys.argv[1]
OPENAI = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=120)
ANTHROPIC = anthropic.Anthropic(base_url=BASE.removesuffix("/v1"), api_key="unused", max_retries=0, timeout=120)
MODEL = OPENAI.models.list().data[0].id
CLIENT_RUNS = re.compile(r"custom|(bash|text_editor|memory|computer)_\d{8}|tool_search_tool_.*")


def values(kind, depth=0):
    """Values of a type: all that a union or a literal allows, and one with the required fields of a typed dictionary."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        return values(arguments[0], depth)
    if origin is typing.Union:
        return [value for part in arguments for value in values(part, depth)]
    if origin is typing.Literal:
        return list(arguments)
    if typing_extensions.is_typeddict(kind):
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        required = [name for name, hint in hints.items() if typing.get_origin(hint) is typing_extensions.Required]
        fixed = {name: values(hints[name], depth + 1)[0] for name in required}
        kinds = [kind for kind in values(hints["type"], depth + 1) if kind] if depth == 0 and "type" in hints else []
        return [fixed | {"type": kind} for kind in kinds] or [fixed]
    if origin in (dict, typing.Mapping) or kind is dict:
        return [{}]
    return {str: ["f"], int: [1024], bool: [True], float: [1.0], type(None): [None]}.get(kind, [[]])


def messages(tool):
    """True if the server accepts the tool, and the model can then call it."""
    said = [{"role": "user", "content": "Hi"}]
    try:
        ANTHROPIC.messages.create(model=MODEL, max_tokens=1, messages=said, tools=[tool])
        return True
    except anthropic.BadRequestError as error:
        assert f"has type `{tool['type']}`, but this server runs no tools." in str(error), error
        return False


def main():
    tools = values(BetaToolUnionParam)
    assert len(tools) > 20, tools
    wrong = [tool for tool in tools if messages(tool) != bool(CLIENT_RUNS.fullmatch(tool.get("type") or "custom"))]
    assert not wrong, wrong
    print(f"ok      Messages: {len(tools)} types of tools of Anthropic's SDK")
    tools = values(ToolParam)
    assert len(tools) > 15, tools
    for tool in tools:
        OPENAI.responses.create(model=MODEL, input="Hi", max_output_tokens=1, tools=[tool])
    print(f"ok      Responses: {len(tools)} types of tools of OpenAI's SDK")


main()
