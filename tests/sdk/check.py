"""Checks a running server with the demo model through the official OpenAI SDK.

    python check.py http://127.0.0.1:5413/v1

Sampling is greedy and the demo model was trained on these answers, so every answer has one correct text.
"""

import asyncio
import json
import sys
import time
import urllib.request

import openai
from openai import OpenAI

BASE = sys.argv[1]
ROOT = BASE.removesuffix("/v1")
# Without retries, so that a single 5xx fails the check.
client = OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=60)
MODEL = client.models.list().data[0].id

SUM = [{"role": "user", "content": "What is 12+7?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "First number"},
                "b": {"type": "number", "description": "Second number"},
            },
            "required": ["a", "b"],
        },
    },
}


def ask(messages, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **more)


def equal(found, expected):
    assert found == expected, f"{found!r} instead of {expected!r}"


def chat():
    answer = ask(SUM)
    choice = answer.choices[0]
    equal(choice.message.content, "12 + 7 = 19.")
    equal(choice.message.role, "assistant")
    equal(choice.finish_reason, "stop")
    equal(answer.object, "chat.completion")
    reasoning = choice.message.reasoning_content
    assert "19" in reasoning and "think>" not in reasoning, reasoning
    usage = answer.usage
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def without_thinking():
    answer = ask(SUM, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    equal(answer.choices[0].message.content, "12 + 7 = 19.")
    assert getattr(answer.choices[0].message, "reasoning_content", None) is None
    equal(answer.usage.completion_tokens_details.reasoning_tokens, 0)


def conversation():
    history = SUM + [{"role": "assistant", "content": "12 + 7 = 19."}, {"role": "user", "content": "What is the capital of France?"}]
    equal(ask(history).choices[0].message.content, "The capital of France is Paris.")


def stream():
    chunks = list(ask(SUM, stream=True, stream_options={"include_usage": True}))
    equal(len({chunk.id for chunk in chunks}), 1)
    *deltas, last = chunks
    equal(last.choices, [])
    assert all(chunk.usage is None for chunk in deltas)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in deltas), "12 + 7 = 19.")
    reasoning = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in deltas)
    whole = ask(SUM)
    equal(reasoning, whole.choices[0].message.reasoning_content)
    equal(last.usage.completion_tokens, whole.usage.completion_tokens)
    equal([chunk.choices[0].delta.role for chunk in deltas if chunk.choices[0].delta.role], ["assistant"])
    equal([chunk.choices[0].finish_reason for chunk in deltas if chunk.choices[0].finish_reason], ["stop"])


def streams_as_it_generates():
    """Tokens arrive one by one: the first long before the last."""
    start, times = time.monotonic(), []
    for chunk in ask([{"role": "user", "content": "Tell me a story about an owl."}], stream=True, max_tokens=100):
        times.append(time.monotonic() - start)
    assert len(times) > 30, len(times)
    assert times[0] < times[-1] / 2, (times[0], times[-1])


def continue_final_message():
    """The answer continues the last assistant message, in its content or its reasoning."""
    last = {"role": "assistant", "content": "12 + 7 ="}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    equal(ask(SUM + [last], extra_body=more).choices[0].message.content, " 19.")
    whole = ask(SUM).choices[0].message.reasoning_content
    cut = whole.index(" 12")
    last = {"role": "assistant", "content": "", "reasoning_content": whole[:cut]}
    answer = ask(SUM + [last], extra_body=more).choices[0].message
    equal((answer.reasoning_content, answer.content), (whole[cut:], "12 + 7 = 19."))


def tool_call():
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = ask(messages, tools=[WEATHER])
    choice = answer.choices[0]
    equal(choice.finish_reason, "tool_calls")
    call = choice.message.tool_calls[0]
    equal((call.type, call.function.name), ("function", "get_weather"))
    equal(json.loads(call.function.arguments), {"city": "Paris"})

    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "sunny", "temperature": 21})}
    answer = ask(messages + [choice.message.model_dump(exclude_none=True), result], tools=[WEATHER])
    equal(answer.choices[0].message.content, "It is sunny in Paris, with 21 degrees.")
    equal(answer.choices[0].finish_reason, "stop")


def tool_call_streamed():
    name, call_id, arguments, reasons = None, None, "", []
    messages = [{"role": "user", "content": "Use the tool to add 123 and 456."}]
    for chunk in ask(messages, tools=[ADD, WEATHER], stream=True):
        choice = chunk.choices[0]
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            equal(call.index, 0)
            name, call_id = name or call.function.name, call_id or call.id
            arguments += call.function.arguments or ""
    equal(name, "add_numbers")
    assert call_id
    equal(json.loads(arguments), {"a": 123, "b": 456})
    equal(reasons, ["tool_calls"])


def logprobs():
    answer = ask(SUM, logprobs=True, top_logprobs=4)
    entries = answer.choices[0].logprobs.content
    for entry in entries:
        equal(len(entry.top_logprobs), 4)
        equal(entry.top_logprobs[0].token, entry.token)
        equal(bytes(entry.bytes).decode(), entry.token)
        assert entry.logprob <= 0
    equal("".join(entry.token for entry in entries), answer.choices[0].message.content)


def stop_and_limits():
    equal(ask(SUM, stop=[" 19"]).choices[0].message.content, "12 + 7 =")
    cut = ask(SUM, max_completion_tokens=3)
    equal((cut.choices[0].finish_reason, cut.usage.completion_tokens), ("length", 3))


def seeded():
    story = [{"role": "user", "content": "Tell me a story."}]
    draw = lambda seed: client.chat.completions.create(
        model=MODEL, messages=story, temperature=1.5, top_p=1, seed=seed, max_tokens=60, extra_body={"top_k": 0}
    ).choices[0].message
    equal(draw(7), draw(7))
    assert any(draw(7) != draw(seed) for seed in (8, 9, 10))


def completions():
    prompt = "<|im_start|>user\nWhat is 12+7?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    answer = client.completions.create(model=MODEL, prompt=[prompt, prompt], temperature=0, max_tokens=30)
    equal([choice.text for choice in answer.choices], ["12 + 7 = 19."] * 2)
    equal([choice.finish_reason for choice in answer.choices], ["stop"] * 2)
    echoed = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=30, echo=True)
    equal(echoed.choices[0].text, prompt + "12 + 7 = 19.")
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=30, stream=True)
    )
    equal(text, "12 + 7 = 19.")


def harness():
    """Scores continuations as lm-evaluation-harness does: the correct one is more likely, and greedy."""

    def tokens(text):
        body = json.dumps({"prompt": text}).encode()
        request = urllib.request.Request(ROOT + "/tokenize", body, {"content-type": "application/json"})
        return json.load(urllib.request.urlopen(request))["tokens"]

    context = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    scores = {}
    for continuation in ["The capital of France is Paris.", "The capital of France is Oslo."]:
        before, after = tokens(context), tokens(continuation)
        answer = client.completions.create(
            model=MODEL, prompt=[before + after], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
        )
        logprobs = answer.choices[0].logprobs
        equal(len(logprobs.token_logprobs), len(before) + len(after) + 1)
        found = logprobs.token_logprobs[len(before) : -1]
        top = logprobs.top_logprobs[len(before) : -1]
        equal("".join(logprobs.tokens[len(before) : -1]), continuation)
        greedy = all(logprob == max(best.values()) for logprob, best in zip(found, top))
        scores[continuation] = (sum(found), greedy)
    (paris, paris_greedy), (oslo, oslo_greedy) = scores.values()
    assert paris > oslo + 1, scores
    equal((paris_greedy, oslo_greedy), (True, False))


def models():
    model = client.models.retrieve(MODEL)
    equal((model.id, model.object), (MODEL, "model"))


def errors():
    def raises(kind, call, code=None):
        try:
            call()
        except kind as error:
            assert error.body and error.body["message"], error.body
            assert error.request_id, "no x-request-id"
            if code:
                equal(error.code, code)
            return
        raise AssertionError(f"no {kind.__name__}")

    raises(openai.BadRequestError, lambda: ask([]))
    raises(openai.BadRequestError, lambda: ask([{"role": "wizard", "content": "Hi"}]))
    raises(openai.BadRequestError, lambda: ask(SUM, n=1000), "invalid_value")
    raises(openai.BadRequestError, lambda: ask(SUM, max_tokens=-2), "invalid_value")
    raises(openai.BadRequestError, lambda: ask(SUM, extra_body={"temperature": "hot"}), "invalid_type")
    raises(openai.BadRequestError, lambda: ask([{"role": "user", "content": "x " * 400_000}]), "context_length_exceeded")
    raises(openai.NotFoundError, lambda: client.models.retrieve("nothing"), "model_not_found")
    raises(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))


def cancellation():
    """A client that disconnects frees the engine at once."""
    stream = ask([{"role": "user", "content": "Tell me a story."}], stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(3000):
        health = json.load(urllib.request.urlopen(ROOT + "/health"))
        if health["requests"] == {"running": 0, "queued": 0}:
            return
        time.sleep(0.02)
    raise AssertionError(health)


def many_at_once():
    """200 requests at the same time are all answered with the library's own number of retries."""
    many = openai.AsyncOpenAI(base_url=BASE, api_key="unused", timeout=300)

    async def answers():
        return await asyncio.gather(*(many.completions.create(model=MODEL, prompt="What is", max_tokens=2) for _ in range(200)))

    equal([answer.usage.completion_tokens for answer in asyncio.run(answers())], [2] * 200)


def main():
    checks = [
        models, chat, without_thinking, conversation, stream, streams_as_it_generates, continue_final_message, tool_call, tool_call_streamed,
        logprobs, stop_and_limits, seeded, completions, harness, errors, cancellation, many_at_once,
    ]
    failed = 0
    for check in checks:
        try:
            check()
            print(f"ok      {check.__name__}")
        except Exception as error:
            failed += 1
            print(f"FAILED  {check.__name__}: {type(error).__name__}: {error}")
    print(f"{len(checks) - failed} of {len(checks)} checks passed (openai {openai.__version__}, {MODEL})")
    sys.exit(failed > 0)


main()
