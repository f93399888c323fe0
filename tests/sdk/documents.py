"""What a running server answers, held to what OpenAI's OpenAPI document says of it: bodies and every event of every stream of
chat completions, completions and responses, models and errors.

    python documents.py http://127.0.0.1:5413/v1

`openai.json` has the facts of that document as JSON schemas: which fields there must be, their types and their words. It is ours;
one thing is wider: the chunks of a streamed completion have no `finish_reason` before the last, as OpenAI's own have not. To see
that the schemas hold anything, each body is changed in every place, too, and must then be refused somewhere.
"""

import copy
import json
import pathlib
import sys
import urllib.error
import urllib.request

from jsonschema import Draft202012Validator

BASE = sys.argv[1]
FACTS = json.loads((pathlib.Path(__file__).parent / "openai.json").read_text())
EVENTS = FACTS.pop("events")
KINDS = {}

SUM = "What is 12+7?"
WEATHER = "What is the weather in Paris?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WORD = {"type": "object", "properties": {"word": {"enum": ["a", "b"]}}, "required": ["word"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
FLAT = {"type": "function", "name": "get_weather", "parameters": CITY}
OLD = {"name": "get_weather", "parameters": CITY}
JSON = {"type": "json_schema", "name": "word", "strict": True, "schema": WORD}

CHAT = [
    {},
    {"tools": [TOOL], "messages": [{"role": "user", "content": WEATHER}]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"functions": [OLD], "messages": [{"role": "user", "content": WEATHER}]},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 2, "seed": 1, "temperature": 1},
    {"max_tokens": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "word", "strict": True, "schema": WORD}}},
    {"reasoning_effort": "none", "stop": ["="]},
    {"stream_options": {"include_usage": True}},
]
TEXT = [{}, {"n": 2}, {"logprobs": 3}, {"logprobs": 1, "echo": True}, {"stop": "e"}, {"stream_options": {"include_usage": True}}]
ITEMS = [
    {},
    {"tools": [FLAT], "input": WEATHER},
    {"tools": [FLAT], "tool_choice": "required"},
    {"reasoning": {"summary": "auto", "effort": "low"}, "include": ["reasoning.encrypted_content"]},
    {"max_output_tokens": 3},
    {"text": {"format": JSON}, "instructions": "Be brief.", "metadata": {"a": "b"}, "store": False},
    {"reasoning": {"effort": "none"}, "temperature": 1},
]
WRONG = [
    ("/chat/completions", {"messages": []}), ("/chat/completions", {}), ("/completions", {"prompt": 5}),
    ("/responses", {"input": []}), ("/responses", {"input": "Hi", "previous_response_id": "resp_0"}), ("/nothing", {}),
    ("/chat/completions", {"messages": [{"role": "user", "content": SUM}], "max_tokes": 5}),
]


def send(path, body=None, method=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def stream(path, body):
    status, text = send(path, body | {"stream": True})
    assert status == 200, text
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    data = [line.removeprefix("data: ") for frame in frames for line in frame.split("\n") if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def validator(schema):
    return Draft202012Validator({"$defs": FACTS, **schema})


def hold(name, value):
    """`value` is what the document says of `name`: a definition, or an event by its type."""
    if name == "event":
        name = value.get("type")
        assert name in EVENTS, f"no event of the document is {name}"
        check = validator(EVENTS[name])
    else:
        check = validator({"$ref": f"#/$defs/{name}"})
    errors = sorted(check.iter_errors(value), key=lambda error: list(error.path))
    assert not errors, f"{name}: {errors[0].message[:300]} at {list(errors[0].path)} of {json.dumps(value)[:600]}"
    count, refused = KINDS.get(name, (0, 0))
    KINDS[name] = (count + 1, refused or sum(not check.is_valid(other) for other in changed(value)))


def changed(value):
    """`value` with one field removed, or with one that is no such thing."""
    for key in value:
        without = copy.deepcopy(value)
        del without[key]
        yield without
        yield value | {key: [[{}]]}


def main():
    messages = [{"role": "user", "content": SUM}]
    for more in CHAT:
        body = {"messages": messages, "temperature": 0} | more
        options = body.pop("stream_options", None)
        hold("chat", json.loads(send("/chat/completions", body)[1]))
        chunks = stream("/chat/completions", body | ({"stream_options": options} if options else {}))
        for chunk in chunks:
            hold("chat_chunk", chunk)
        assert not options or chunks[-1]["usage"]["total_tokens"] and not chunks[-1]["choices"], chunks[-1]
    for more in TEXT:
        body = {"prompt": ["One, two,", "A"], "max_tokens": 6, "temperature": 0} | more
        options = body.pop("stream_options", None)
        hold("completion", json.loads(send("/completions", body)[1]))
        for chunk in stream("/completions", body | ({"stream_options": options} if options else {})):
            hold("completion_chunk", chunk)
    for more in ITEMS:
        body = {"input": SUM, "temperature": 0} | more
        response = json.loads(send("/responses", body)[1])
        hold("response", response)
        for number, event in enumerate(stream("/responses", body)):
            hold("event", event)
            assert event["sequence_number"] == number, event
        if body.get("store", True):
            hold("response", json.loads(send(f"/responses/{response['id']}")[1]))
            hold("deleted", json.loads(send(f"/responses/{response['id']}", method="DELETE")[1]))
    hold("models", json.loads(send("/models")[1]))
    for path, body in WRONG:
        status, text = send(path, body)
        assert 400 <= status < 500, (path, status)
        hold("error", json.loads(text))
    never = set(EVENTS) - set(KINDS) - {"response.failed", "error"}
    assert not never, f"no stream had {never}"
    for name, (_, refused) in KINDS.items():
        assert refused > 1, f"the schema of {name} refuses next to nothing"
    print(f"ok      {sum(count for count, _ in KINDS.values())} bodies and events of {len(KINDS)} kinds are as the document says")


main()
