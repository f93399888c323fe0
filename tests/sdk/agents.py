"""Checks a running server with the demo model through pydantic-ai and instructor.

Covers text, streaming, errors, a client that disconnects, and a tool loop of thirty turns that sends the history back
with and without its reasoning. Structured objects are in schemas.py, so only the errors of instructor are checked here.

    python agents.py http://127.0.0.1:5413/v1
"""

import asyncio
import dataclasses
import json
import logging
import re
import sys
import time
import urllib.request

import instructor
import openai
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE = sys.argv[1]
ROOT = BASE.removesuffix("/v1")
OPENAI = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=120)
MODEL = OPENAI.models.list().data[0].id
CITIES = ["Paris", "Oslo", "Rome", "Madrid", "Berlin", "Vienna", "Lisbon", "Athens", "Dublin", "Cairo"]
TURNS = 30
SUM, ANSWER = "What is 12+7?", "12 + 7 = 19."
KINDS = [OpenAIChatModel, OpenAIResponsesModel]


def requests():
    return json.load(urllib.request.urlopen(ROOT + "/health"))["requests"]


def idle():
    for _ in range(3000):
        if (found := requests())["running"] == found["queued"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError(found)


def agent(kind, **more):
    provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=BASE, api_key="unused", max_retries=0))
    return Agent(kind(more.pop("model", MODEL), provider=provider), retries=0, model_settings={"temperature": 0}, **more)


async def text():
    for kind in KINDS:
        answer = await agent(kind).run(SUM)
        assert answer.output == ANSWER, answer.output
        thought = [part for part in answer.all_messages()[-1].parts if isinstance(part, ThinkingPart)]
        # The library stores reasoning without a summary in provider_details, to send it back.
        assert any("19" in part.content + str(part.provider_details) for part in thought), answer.all_messages()


async def streamed():
    for kind in KINDS:
        async with agent(kind).run_stream(SUM) as answer:
            pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == ANSWER and len(pieces) > 1, pieces


async def errors():
    for kind in KINDS:
        try:
            await agent(kind, model="org/none").run(SUM)
        except ModelHTTPError as error:
            assert error.status_code == 404, error
        else:
            raise AssertionError("no error")


def cancelled():
    metrics = urllib.request.urlopen(ROOT + "/metrics").read().decode()
    return re.findall(r'^moestro_answers_total\{finish_reason="cancelled"\} (\d+)', metrics, re.MULTILINE)


async def cancel(kind):
    """Leaves during an answer. Returns whether the server has cancelled the answer."""
    before = await asyncio.to_thread(cancelled)
    task = asyncio.create_task(agent(kind).run("Tell me a story."))
    while not task.done() and not await asyncio.to_thread(lambda: requests()["running"]):
        await asyncio.sleep(0.02)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    await asyncio.to_thread(idle)
    return await asyncio.to_thread(cancelled) != before


async def cancellation():
    for kind in KINDS:
        # An answer may be complete before this program sees that the server works on it.
        for tries in range(1, 11):
            if await cancel(kind):
                break
        else:
            raise AssertionError(f"{kind.__name__}: no answer of {tries} was cancelled")


async def loop(kind, keeps_reasoning):
    calls = 0
    weather = agent(kind)

    @weather.tool_plain
    def get_weather(city: str) -> dict:
        """Get the current weather of a city."""
        nonlocal calls
        calls += 1
        return {"sky": "sunny", "temperature": 21}

    history = []
    for turn in range(TURNS):
        answer = await weather.run(f"What is the weather in {CITIES[turn % len(CITIES)]}?", message_history=history)
        assert "<tool_call" not in answer.output and "<function" not in answer.output, answer.output
        history = answer.all_messages()
        if not keeps_reasoning:
            history = [without_reasoning(message) for message in history]
    assert calls > 0
    return f"{calls} calls in {TURNS} turns"


def without_reasoning(message):
    return dataclasses.replace(message, parts=[part for part in message.parts if not isinstance(part, ThinkingPart)])


class Word(BaseModel):
    word: str


async def instructor_errors():
    client = instructor.from_openai(OPENAI, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": SUM}]
    try:
        client.chat.completions.create(model="org/none", messages=messages, response_model=Word, max_retries=0)
    except Exception as error:
        assert "does not exist here" in str(error), error
    else:
        raise AssertionError("no error")


async def main():
    checks = [(check.__name__, check) for check in (text, streamed, errors, cancellation)]
    for kind in KINDS:
        checks.append((f"loop: {kind.__name__}, with reasoning", lambda kind=kind: loop(kind, True)))
        checks.append((f"loop: {kind.__name__}, without reasoning", lambda kind=kind: loop(kind, False)))
    checks.append(("instructor: errors", instructor_errors))
    failed = 0
    for name, check in checks:
        start = time.monotonic()
        try:
            note = await check()
            print(f"ok      {name} ({note or ''}{', ' if note else ''}{time.monotonic() - start:.1f} s)")
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {str(error)[:600]}")
    print(f"{len(checks) - failed} of {len(checks)} checks passed (pydantic-ai, instructor)")
    return failed > 0


logging.disable()
sys.exit(asyncio.run(main()))
