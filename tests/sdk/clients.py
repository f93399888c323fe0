"""Checks a running server with the demo model through OpenAI's Responses, Anthropic's Messages, LiteLLM and LangChain.

Each library is checked with text, streaming, a tool, an error, and an agent loop of thirty turns.

    python clients.py http://127.0.0.1:5413/v1
"""

import json
import os
import sys
import time
import urllib.request

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise it downloads a price list.

import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

BASE = sys.argv[1]
ROOT = BASE.removesuffix("/v1")
OPENAI = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=120)
ANTHROPIC = anthropic.Anthropic(base_url=ROOT, api_key="unused", max_retries=0, timeout=120)
MODEL = OPENAI.models.list().data[0].id
litellm.telemetry = False

SUM = "What is 12+7?"
ANSWER = "12 + 7 = 19."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city"}},
    "required": ["city"],
}
NAME, DESCRIPTION = "get_weather", "Get the current weather of a city."
CHAT_TOOL = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}}
TOOL = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
ANTHROPIC_TOOL = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}
CITIES = ["Paris", "Oslo", "Rome", "Madrid", "Berlin", "Vienna", "Lisbon", "Athens", "Dublin", "Cairo"]
TURNS = 30
RESULT = json.dumps({"sky": "sunny", "temperature": 21})


def equal(found, expected):
    assert found == expected, f"{found!r} instead of {expected!r}"


def idle():
    """Waits until the engine is idle: a disconnected client must not keep it busy."""
    for _ in range(3000):
        health = json.load(urllib.request.urlopen(ROOT + "/health"))
        if health["requests"]["running"] == health["requests"]["queued"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError(health)


def question(turn):
    return f"What is the weather in {CITIES[turn % len(CITIES)]}?"


def tool_choice(turn, step, word="required"):
    """Requires the tool in every other turn, because the demo model no longer calls it after thousands of tokens."""
    return word if turn % 2 and step == 0 else "auto"


# OpenAI's Responses.


def respond(input, **more):
    return OPENAI.responses.create(model=MODEL, input=input, temperature=0, **more)


def responses_text():
    answer = respond(SUM)
    equal((answer.status, answer.output_text), ("completed", ANSWER))
    equal([item.type for item in answer.output], ["reasoning", "message"])
    assert "19" in answer.output[0].content[0].text
    equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens)
    quiet = respond(SUM, reasoning={"effort": "none"})
    equal(([item.type for item in quiet.output], quiet.output_text), (["message"], ANSWER))


def responses_stream():
    with OPENAI.responses.stream(model=MODEL, input=SUM, temperature=0) as stream:
        events = list(stream)
    equal([events[0].type, events[-1].type], ["response.created", "response.completed"])
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), ANSWER)
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    equal(thought, events[-1].response.output[0].content[0].text)
    equal(events[-1].response.output_text, ANSWER)


def responses_logprobs():
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    part = respond(SUM, **include).output[-1].content[0]
    equal("".join(entry.token for entry in part.logprobs), ANSWER)
    for entry in part.logprobs:
        equal((entry.token.encode(), len(entry.top_logprobs)), (bytes(entry.bytes), 3))
        equal(entry.top_logprobs[0].logprob, entry.logprob)
    with OPENAI.responses.stream(model=MODEL, input=SUM, temperature=0, **include) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        equal(stream.get_final_response().output[-1].content[0].logprobs, part.logprobs)
    equal([entry.token for event in deltas for entry in event.logprobs], [entry.token for entry in part.logprobs])


def responses_tool():
    answer = respond(question(0), tools=[TOOL])
    call = answer.output[-1]
    equal((call.type, call.name, json.loads(call.arguments)), ("function_call", NAME, {"city": "Paris"}))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    answer = respond([output], tools=[TOOL], previous_response_id=answer.id)
    equal(answer.output_text, "It is sunny in Paris, with 21 degrees.")
    equal(OPENAI.responses.retrieve(answer.id).output_text, answer.output_text)
    OPENAI.responses.delete(answer.id)
    raises(openai.NotFoundError, lambda: OPENAI.responses.retrieve(answer.id))


def responses_errors():
    raises(openai.BadRequestError, lambda: respond([]))
    raises(openai.BadRequestError, lambda: respond("Hi", background=True))
    raises(openai.NotFoundError, lambda: respond("Hi", previous_response_id="resp_0"))
    stream = respond("Tell me a story.", stream=True)
    next(iter(stream))
    stream.close()
    idle()


def responses_progress():
    """The library ignores the progress events, which are our extension."""
    with OPENAI.responses.stream(model=MODEL, input=SUM, temperature=0, extra_body={"return_progress": True}) as stream:
        kinds = [event.type for event in stream]
        equal(stream.get_final_response().output_text, ANSWER)
    assert "response.prompt_progress" in kinds, kinds


def responses_loop(history_kind):
    """`history_kind`: stored on the `server`, or sent back with `all` items or with the `text` only."""
    history, previous = [], None
    for turn in range(TURNS):
        step = [{"role": "user", "content": question(turn)}]
        for number in range(2):
            history += step
            more = {"previous_response_id": previous} if history_kind == "server" else {"store": False}
            more["tool_choice"] = tool_choice(turn, number)
            answer = respond(step if history_kind == "server" else history, tools=[TOOL], **more)
            previous = answer.id
            output = [item.model_dump(exclude_none=True) for item in answer.output]
            history += [item for item in output if history_kind == "all" or item["type"] != "reasoning"]
            calls = [item for item in answer.output if item.type == "function_call"]
            step = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
            if not calls:
                break
            called(json.loads(calls[0].arguments), turn)
        clean(answer.output_text)


# Anthropic's Messages.


# New versions of the library have no temperature argument.
GREEDY = {"model": MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}


def message(messages, **more):
    return ANTHROPIC.messages.create(**GREEDY | more, messages=messages)


def user(content):
    return {"role": "user", "content": content}


THINKING = {"type": "enabled", "budget_tokens": 1024}


def messages_text():
    answer = message([user(SUM)])
    equal([block.type for block in answer.content], ["text"])
    equal((answer.content[0].text, answer.stop_reason), (ANSWER, "end_turn"))
    answer = message([user(SUM)], thinking=THINKING, max_tokens=2000)
    equal([block.type for block in answer.content], ["thinking", "text"])
    assert "19" in answer.content[0].thinking
    counted = ANTHROPIC.messages.count_tokens(model=MODEL, messages=[user(SUM)], thinking=THINKING).input_tokens
    equal(counted, answer.usage.input_tokens + answer.usage.cache_read_input_tokens)
    stopped = message([user(SUM)], stop_sequences=["= 1"])
    equal((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", "= 1"))
    equal(message([user(SUM)], max_tokens=2).stop_reason, "max_tokens")


def messages_stream():
    with ANTHROPIC.messages.stream(**GREEDY | {"max_tokens": 2000}, thinking=THINKING, messages=[user(SUM)]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    equal(text, ANSWER)
    equal([block.type for block in final.content], ["thinking", "text"])
    assert final.content[0].signature and final.usage.output_tokens > 0


def messages_tool():
    ask = [user(question(0))]
    answer = message(ask, tools=[ANTHROPIC_TOOL])
    call = answer.content[-1]
    equal((answer.stop_reason, call.name, call.input), ("tool_use", NAME, {"city": "Paris"}))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    answer = message(ask + [{"role": "assistant", "content": answer.content}, user([result])], tools=[ANTHROPIC_TOOL])
    equal(answer.content[0].text, "It is sunny in Paris, with 21 degrees.")
    with ANTHROPIC.messages.stream(**GREEDY, messages=ask, tools=[ANTHROPIC_TOOL]) as stream:
        equal(stream.get_final_message().content[-1].input, {"city": "Paris"})


def messages_tool_runner():
    """The runner first asks the server to store the conversation."""
    tool = anthropic.beta_tool(lambda city: RESULT, **ANTHROPIC_TOOL)
    for stream in [False, True]:
        ask = {**GREEDY, "messages": [user(question(0))], "tools": [tool], "stream": stream}
        answers = [turn.get_final_message() if stream else turn for turn in ANTHROPIC.beta.messages.tool_runner(**ask)]
        equal([answer.stop_reason for answer in answers], ["tool_use", "end_turn"])
        equal(answers[1].content[0].text, "It is sunny in Paris, with 21 degrees.")


def messages_errors():
    raises(anthropic.BadRequestError, lambda: message([]))
    raises(anthropic.BadRequestError, lambda: message([user("x " * 400_000)]))
    raises(anthropic.NotFoundError, lambda: message([user("Hi")], model="org/none"))
    with ANTHROPIC.messages.stream(model=MODEL, max_tokens=2000, messages=[user("Tell me a story.")]) as stream:
        next(iter(stream))
    idle()


WORD = {
    "type": "object", "properties": {"word": {"enum": ["a", "b"]}}, "required": ["word"], "additionalProperties": False,
}


def messages_schema():
    config = {"format": {"type": "json_schema", "schema": WORD}}
    for more in [{}, {"thinking": THINKING, "max_tokens": 2000}]:
        answer = message([user(SUM)], output_config=config, **more)
        assert json.loads(answer.content[-1].text)["word"] in "ab", answer.content


def messages_prefill():
    answer = message([user(SUM), {"role": "assistant", "content": "12 + 7 ="}])
    equal(answer.content[0].text, " 19.")


def messages_loop(keeps):
    history = []
    for turn in range(TURNS):
        history.append(user(question(turn)))
        for step in range(2):
            choice = {"type": tool_choice(turn, step, "any")}
            answer = message(history, tools=[ANTHROPIC_TOOL], thinking=THINKING, max_tokens=2000, tool_choice=choice)
            content = [block for block in answer.content if keeps or block.type != "thinking"]
            history.append({"role": "assistant", "content": content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            called(calls[0].input, turn)
            history.append(
                user([{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls])
            )
        clean("".join(block.text for block in answer.content if block.type == "text"))


# Chat completions, by OpenAI's library and by LiteLLM.


def chat_loop(create, keeps):
    history = []
    for turn in range(TURNS):
        history.append(user(question(turn)))
        for step in range(2):
            ask = {"messages": history, "tools": [CHAT_TOOL], "tool_choice": tool_choice(turn, step), "temperature": 0}
            answer = create(**ask).choices[0].message
            said = answer.model_dump(exclude_none=True)
            if not keeps:
                said.pop("reasoning_content", None)
            history.append(said)
            if not answer.tool_calls:
                break
            called(json.loads(answer.tool_calls[0].function.arguments), turn)
            for call in answer.tool_calls:
                history.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        clean(answer.content)


def by_openai(**more):
    return OPENAI.chat.completions.create(model=MODEL, **more)


def by_litellm(**more):
    return litellm.completion(model=f"openai/{MODEL}", api_base=BASE, api_key="unused", num_retries=0, **more)


def litellm_text():
    answer = by_litellm(messages=[user(SUM)], temperature=0)
    equal(answer.choices[0].message.content, ANSWER)
    assert "19" in answer.choices[0].message.reasoning_content
    chunks = by_litellm(messages=[user(SUM)], temperature=0, stream=True)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), ANSWER)
    raises(litellm.BadRequestError, lambda: by_litellm(messages=[]))
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=ROOT, api_key="unused", messages=[user(SUM)], temperature=0, max_tokens=300
    )
    equal(answer.choices[0].message.content, ANSWER)


def litellm_more():
    form = {"type": "json_schema", "json_schema": {"name": "word", "strict": True, "schema": WORD}}
    answer = by_litellm(messages=[user(SUM)], response_format=form)
    assert json.loads(answer.choices[0].message.content)["word"] in "ab"
    stream = by_litellm(messages=[user("Tell me a story.")], stream=True)
    next(iter(stream))
    stream.completion_stream.close()
    idle()


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return RESULT


def langchain(**more):
    return ChatOpenAI(model=MODEL, base_url=BASE, api_key="unused", temperature=0, max_retries=0, **more)


def langchain_text():
    for model in [langchain(), langchain(use_responses_api=True)]:
        equal(model.invoke(SUM).text, ANSWER)
        equal("".join(chunk.text for chunk in model.stream(SUM)), ANSWER)


def langchain_more():
    for model in [langchain(), langchain(use_responses_api=True)]:
        raises(openai.BadRequestError, lambda: model.invoke([]))
        stream = model.stream("Tell me a story.")
        next(stream)
        stream.close()
        idle()
    thought = langchain(use_responses_api=True).invoke(SUM)
    assert any(block["type"] == "reasoning" for block in thought.content), thought.content


def full_context():
    """A prompt that is too long has the libraries' own error type, with which programs shorten their prompt."""
    long = "x " * 400_000
    for provider, base in [("openai", BASE), ("hosted_vllm", BASE), ("lm_studio", BASE), ("anthropic", ROOT)]:
        for stream in [False, True]:
            name = f"{provider}/{MODEL}"
            raises(litellm.ContextWindowExceededError, lambda: litellm.completion(
                model=name, api_base=base, api_key="unused", num_retries=0, messages=[user(long)], stream=stream))
    claude = ChatAnthropic(model=MODEL, base_url=ROOT, api_key="unused", max_tokens=5, max_retries=0)
    for model in [langchain(), langchain(use_responses_api=True), claude]:
        raises(ContextOverflowError, lambda: model.invoke(long))
        raises(ContextOverflowError, lambda: next(iter(model.stream(long))))


def langchain_loop(responses, keeps=True):
    bare = langchain(use_responses_api=responses)
    history = []
    for turn in range(TURNS):
        history.append(HumanMessage(question(turn)))
        for step in range(2):
            answer = bare.bind_tools([get_weather], tool_choice=tool_choice(turn, step)).invoke(history)
            assert isinstance(answer, AIMessage)
            if not keeps:
                answer.content = [block for block in answer.content if block["type"] != "reasoning"]
            history.append(answer)
            if not answer.tool_calls:
                break
            called(answer.tool_calls[0]["args"], turn)
            history += [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        clean(answer.text)


CALLED = 0


def called(arguments, turn):
    """Counts a call. Its arguments must be an object; their values depend on the model."""
    global CALLED
    assert isinstance(arguments, dict), (turn, arguments)
    CALLED += 1


def clean(text):
    """Checks that the text contains no markup. The text itself depends on the model after thousands of tokens."""
    assert "<tool_call" not in text and "<function" not in text and "think>" not in text, text


def raises(kind, call):
    try:
        call()
    except kind as error:
        assert str(error)
        return
    raise AssertionError(f"no {kind.__name__}")


def main():
    checks = [
        responses_text, responses_stream, responses_logprobs, responses_tool, responses_errors,
        responses_progress, messages_text, messages_stream, messages_tool, messages_tool_runner, messages_errors, messages_schema,
        messages_prefill, litellm_text, litellm_more, langchain_text, langchain_more,
        full_context,
    ]
    loops = [
        ("responses, history on the server", lambda: responses_loop("server")),
        ("responses, all items sent back", lambda: responses_loop("all")),
        ("responses, sent back without reasoning", lambda: responses_loop("text")),
        ("messages, with thinking", lambda: messages_loop(True)),
        ("messages, without thinking", lambda: messages_loop(False)),
        ("chat, with reasoning", lambda: chat_loop(by_openai, True)),
        ("chat, without reasoning", lambda: chat_loop(by_openai, False)),
        ("litellm, with reasoning", lambda: chat_loop(by_litellm, True)),
        ("litellm, without reasoning", lambda: chat_loop(by_litellm, False)),
        # The library drops the reasoning of chat completions.
        ("langchain, chat", lambda: langchain_loop(False)),
        ("langchain, responses, with reasoning", lambda: langchain_loop(True)),
        ("langchain, responses, without reasoning", lambda: langchain_loop(True, keeps=False)),
    ]
    failed = 0

    def attempt(name, check):
        global CALLED
        nonlocal failed
        CALLED, start = 0, time.monotonic()
        try:
            check()
            assert not CALLED or CALLED >= TURNS // 2, CALLED
            calls = f" ({CALLED} calls in {TURNS} turns, {time.monotonic() - start:.1f} s)" if CALLED else ""
            print(f"ok      {name}{calls}")
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {str(error)[:600]}")

    for check in checks:
        attempt(check.__name__, check)
    for name, check in loops:
        attempt(f"loop: {name}", check)
    total = len(checks) + len(loops)
    print(f"{total - failed} of {total} checks passed (openai {openai.__version__}, anthropic {anthropic.__version__})")
    sys.exit(failed > 0)


main()
