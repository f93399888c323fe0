"""Checks Ollama's API of a running server with the demo model through ollama-python and LangChain's ChatOllama.

    python ollama_clients.py http://127.0.0.1:11434
"""

import asyncio
import json
import sys

import ollama
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

HOST = sys.argv[1]
CLIENT = ollama.Client(host=HOST)
SUM = [{"role": "user", "content": "What is 12+7?"}]
ANSWER = "12 + 7 = 19."
OPTIONS = {"temperature": 0, "num_predict": 200}
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: Name of the city
    """
    return json.dumps({"sky": "sunny", "temperature": 21, "city": city})


def equal(found, expected):
    assert found == expected, f"{found!r} instead of {expected!r}"


MODEL = CLIENT.list().models[0].model


def lists():
    shown = CLIENT.show(MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities), shown.capabilities
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] > 1000
    equal(CLIENT.ps().models[0].model, MODEL)


def chat():
    answer = CLIENT.chat(MODEL, SUM, options=OPTIONS)
    equal(answer.message.content, ANSWER)
    assert answer.message.thinking and answer.done_reason == "stop" and answer.eval_count > 5
    quiet = CLIENT.chat(MODEL, SUM, options=OPTIONS, think=False)
    assert not quiet.message.thinking, quiet


def stream():
    parts = list(CLIENT.chat(MODEL, SUM, options=OPTIONS, stream=True))
    equal("".join(part.message.content for part in parts), ANSWER)
    assert len(parts) > 5 and parts[-1].done and not parts[0].done


def tools():
    messages = list(WEATHER)
    answer = CLIENT.chat(MODEL, messages, tools=[get_weather], options=OPTIONS)
    [call] = answer.message.tool_calls
    equal((call.function.name, dict(call.function.arguments)), ("get_weather", {"city": "Oslo"}))
    messages += [answer.message, {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")}]
    assert CLIENT.chat(MODEL, messages, tools=[get_weather], options=OPTIONS).message.content
    streamed = [part.message.tool_calls for part in CLIENT.chat(MODEL, WEATHER, tools=[get_weather], options=OPTIONS, stream=True)]
    equal([dict(call.function.arguments) for calls in streamed if calls for call in calls], [{"city": "Oslo"}])


def formats():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    answer = CLIENT.chat(MODEL, SUM, format=schema, options=OPTIONS, think=False)
    assert isinstance(json.loads(answer.message.content)["n"], int), answer
    text = CLIENT.generate(MODEL, "What is 12+7?", format="json", options=OPTIONS, think=False).response
    assert text.startswith("{"), text


def generate():
    equal(CLIENT.generate(MODEL, "What is 12+7?", options=OPTIONS).response, ANSWER)
    parts = list(CLIENT.generate(MODEL, "What is 12+7?", options=OPTIONS, stream=True))
    equal("".join(part.response for part in parts), ANSWER)
    assert CLIENT.generate(MODEL, "Once", raw=True, options=OPTIONS).response


def errors():
    for call, status in [
        (lambda: CLIENT.show("nothing/here"), 404),
        (lambda: CLIENT.chat(MODEL, SUM, options={"mirostat": 1}), 400),
    ]:
        try:
            call()
        except ollama.ResponseError as error:
            assert error.status_code == status and error.error, error
        else:
            raise AssertionError("no error")


def asynchronous():
    async def ask():
        return await ollama.AsyncClient(host=HOST).chat(MODEL, SUM, options=OPTIONS)

    equal(asyncio.run(ask()).message.content, ANSWER)


def langchain():
    model = ChatOllama(model=MODEL, base_url=HOST, temperature=0, num_predict=200, reasoning=True)
    answer = model.invoke([HumanMessage(SUM[0]["content"])])
    equal(answer.content, ANSWER)
    assert answer.additional_kwargs["reasoning_content"] and answer.usage_metadata["output_tokens"] > 5
    equal("".join(part.content for part in model.stream(SUM[0]["content"])), ANSWER)
    bound = model.bind_tools([tool(get_weather)])
    call = bound.invoke(WEATHER[0]["content"])
    equal([(it["name"], it["args"]) for it in call.tool_calls], [("get_weather", {"city": "Oslo"})])
    result = ToolMessage(get_weather("Oslo"), tool_call_id=call.tool_calls[0]["id"])
    assert bound.invoke([HumanMessage(WEATHER[0]["content"]), call, result]).content


for check in (lists, chat, stream, tools, formats, generate, errors, asynchronous, langchain):
    check()
    print(f"ok      ollama {check.__name__}")
