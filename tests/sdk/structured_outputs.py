"""Generates answers at temperature 1 under the schemas of tests/fixtures/schemas.json, as content and as arguments of a
required tool call.

    python structured_outputs.py http://127.0.0.1:5413/v1 [ANSWERS [FIRST]]

Every answer that is not truncated must be valid JSON. If the schema is strict, the answer must also validate with
`jsonschema`; without strict, unsupported keywords are dropped. Every required tool must be called. Truncated answers
are counted separately: the demo model was not trained on schemas and may never end an unbounded string or array.
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
MAX_TOKENS = 600


def as_content(case, seed):
    json_schema = {"name": "answer", "strict": case["strict"], "schema": case["schema"]}
    choice = ask(seed, response_format={"type": "json_schema", "json_schema": json_schema})
    return choice, choice.message.content


def as_call(case, seed):
    function = {"name": "answer", "strict": case["strict"], "parameters": case["schema"]}
    choice = ask(seed, tools=[{"type": "function", "function": function}], tool_choice="required")
    if choice.finish_reason == "length":
        return choice, None
    assert choice.message.tool_calls, choice.message
    return choice, choice.message.tool_calls[0].function.arguments


def ask(seed, **fields):
    messages = [{"role": "user", "content": "Tell me about the weather in Oslo."}]
    more = {"thinking_budget": 40, "top_k": 0, "min_p": 0}
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=messages, temperature=1, top_p=1, seed=seed, max_tokens=MAX_TOKENS, extra_body=more, **fields
    )
    return answer.choices[0]


def main():
    start, counts = time.monotonic(), {"valid": 0, "truncated": 0, "wrong": 0}
    for index in range(FIRST, FIRST + ANSWERS):
        case, turn = CASES[index % len(CASES)], index // len(CASES)
        # Arguments must be an object, so other schemas are checked as content only.
        request = as_call if turn % 2 and case["schema"].get("type") == "object" else as_content
        try:
            choice, text = request(case, index)
            if choice.finish_reason == "length":
                counts["truncated"] += 1
                continue
            value = json.loads(text)
            if case["strict"]:
                jsonschema.Draft202012Validator(case["schema"]).validate(value)
            counts["valid"] += 1
        except Exception as error:
            counts["wrong"] += 1
            print(f"FAILED  {case['name']}, {request.__name__}, seed {index}: {type(error).__name__}: {str(error)[:400]}")
    seconds = time.monotonic() - start
    print(f"{ANSWERS} answers to {len(CASES)} schemas in {seconds:.0f} s: {counts}")
    sys.exit(counts["wrong"] > 0 or counts["valid"] < ANSWERS // 2)


main()
