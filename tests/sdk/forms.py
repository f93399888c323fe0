"""Answers at temperature 1, each held to one of the schemas in tests/fixtures/schemas.json: as content and as the arguments of a
tool that must be called.

    python forms.py http://127.0.0.1:5413/v1 [ANSWERS [FIRST]]

Every answer that ends by itself must parse and, where the schema is strict, validate (by the package `jsonschema`; without
strict, keywords that cannot be kept are left out). Every required tool must be called. An answer that reaches the limit of
tokens is counted apart: the demo model has never seen a schema, and may go on in a string or an array without a bound for as
long as it is let.
"""

import json
import pathlib
import sys
import time

import jsonschema
import openai

CLIENT = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=300)
ANSWERS = int(sys.argv[2]) if len(sys.argv) > 2 else 126
FIRST = int(sys.argv[3]) if len(sys.argv) > 3 else 0
CASES = json.loads((pathlib.Path(__file__).parent.parent / "fixtures" / "schemas.json").read_text())
MODEL = CLIENT.models.list().data[0].id
MOST = 600


def as_content(case, seed):
    form = {"name": "answer", "strict": case["strict"], "schema": case["schema"]}
    choice = ask(seed, response_format={"type": "json_schema", "json_schema": form})
    return choice, choice.message.content


def as_call(case, seed):
    function = {"name": "answer", "strict": case["strict"], "parameters": case["schema"]}
    choice = ask(seed, tools=[{"type": "function", "function": function}], tool_choice="required")
    if choice.finish_reason == "length":
        return choice, None
    assert choice.message.tool_calls, choice.message
    return choice, choice.message.tool_calls[0].function.arguments


def ask(seed, **form):
    messages = [{"role": "user", "content": "Tell me about the weather in Oslo."}]
    more = {"thinking_budget": 40, "top_k": 0, "min_p": 0}
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=messages, temperature=1, top_p=1, seed=seed, max_tokens=MOST, extra_body=more, **form
    )
    return answer.choices[0]


def main():
    began, told = time.monotonic(), {"valid": 0, "cut": 0, "wrong": 0}
    for index in range(FIRST, FIRST + ANSWERS):
        case, turn = CASES[index % len(CASES)], index // len(CASES)
        # Arguments are an object; other schemas are for contents only.
        way = as_call if turn % 2 and case["schema"].get("type") == "object" else as_content
        try:
            choice, text = way(case, index)
            if choice.finish_reason == "length":
                told["cut"] += 1
                continue
            value = json.loads(text)
            if case["strict"]:
                jsonschema.Draft202012Validator(case["schema"]).validate(value)
            told["valid"] += 1
        except Exception as error:
            told["wrong"] += 1
            print(f"FAILED  {case['name']}, {way.__name__}, seed {index}: {type(error).__name__}: {str(error)[:400]}")
    seconds = time.monotonic() - began
    print(f"{ANSWERS} answers to {len(CASES)} schemas in {seconds:.0f} s: {told}")
    sys.exit(told["wrong"] > 0 or told["valid"] < ANSWERS // 2)


main()
