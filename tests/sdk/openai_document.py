"""Validates the answers of a running server against OpenAI's OpenAPI document: bodies and stream events of chat
completions, completions and responses, models, and errors.

    python openai_document.py http://127.0.0.1:5413/v1

`openai.json` restates the document as JSON schemas: required fields, types and allowed strings. It differs in one
point: only the last chunk of a streamed completion needs a `finish_reason`, as in OpenAI's real streams. To prove that
the schemas check anything, each body is also changed in every place, and some of the changed bodies must be refused.
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
    {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
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


def validate(name, value):
    """Validates `value` against the definition `name`, or against the event of its type."""
    if name == "event":
        name = value.get("type")
        assert name in EVENTS, f"the document has no event {name}"
        check = validator(EVENTS[name])
    else:
        check = validator({"$ref": f"#/$defs/{name}"})
    errors = sorted(check.iter_errors(value), key=lambda error: list(error.path))
    assert not errors, f"{name}: {errors[0].message[:300]} at {list(errors[0].path)} of {json.dumps(value)[:600]}"
    count, refused = KINDS.get(name, (0, 0))
    KINDS[name] = (count + 1, refused or sum(not check.is_valid(other) for other in changed(value)))


def changed(value):
    """Yields copies of `value` with one field removed, or with one field of a wrong type."""
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
        validate("chat", json.loads(send("/chat/completions", body)[1]))
        chunks = stream("/chat/completions", body | ({"stream_options": options} if options else {}))
        for chunk in chunks:
            validate("chat_chunk", chunk)
        assert not options or chunks[-1]["usage"]["total_tokens"] and not chunks[-1]["choices"], chunks[-1]
    for more in TEXT:
        body = {"prompt": ["One, two,", "A"], "max_tokens": 6, "temperature": 0} | more
        options = body.pop("stream_options", None)
        validate("completion", json.loads(send("/completions", body)[1]))
        for chunk in stream("/completions", body | ({"stream_options": options} if options else {})):
            validate("completion_chunk", chunk)
    for more in ITEMS:
        body = {"input": SUM, "temperature": 0} | more
        response = json.loads(send("/responses", body)[1])
        validate("response", response)
        for number, event in enumerate(stream("/responses", body)):
            validate("event", event)
            assert event["sequence_number"] == number, event
        if body.get("store", True):
            validate("response", json.loads(send(f"/responses/{response['id']}")[1]))
            validate("deleted", json.loads(send(f"/responses/{response['id']}", method="DELETE")[1]))
    validate("models", json.loads(send("/models")[1]))
    for path, body in WRONG:
        status, text = send(path, body)
        assert 400 <= status < 500, (path, status)
        validate("error", json.loads(text))
    missing = set(EVENTS) - set(KINDS) - {"response.failed", "error"}
    assert not missing, f"no stream had {missing}"
    for name, (_, refused) in KINDS.items():
        assert refused > 1, f"the schema of {name} refuses almost nothing"
    print(f"ok      {sum(count for count, _ in KINDS.values())} bodies and events of {len(KINDS)} kinds match the document")


main()
