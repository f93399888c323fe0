"""Checks structured objects on a running server with the demo model: instructor, pydantic-ai and LangChain, each in
every mode that it has for OpenAI's API.

    python schemas.py http://127.0.0.1:5413/v1

The demo model was not trained on schemas, so only the class of the returned object is checked, not its values.
"""

import sys
import time
from enum import Enum
from typing import Literal

import instructor
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE = sys.argv[1]
OPENAI = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=120)
MODEL = OPENAI.models.list().data[0].id
PROMPT = "The weather in Oslo: sunny, 21 degrees, wind from the west."
# Enough for the classes below, whose strings are bounded. Reasoning has its own budget.
MAX_TOKENS = 1500


class Closed(BaseModel):
    """Forbids further properties: the demo model would add them without end."""

    model_config = ConfigDict(extra="forbid")


class Sky(str, Enum):
    sunny = "sunny"
    cloudy = "cloudy"
    rain = "rain"


class Wind(Closed):
    direction: Literal["north", "east", "south", "west"]
    knots: int = Field(ge=0, le=150)


class Weather(Closed):
    """A weather report."""

    city: str = Field(max_length=40)
    sky: Sky
    temperature: int = Field(ge=-90, le=60)
    wind: Wind | None
    warnings: list[Literal["storm", "frost", "heat"]] = Field(max_length=3)


class Step(Closed):
    left: int = Field(ge=0, le=999)
    right: int = Field(ge=0, le=999)


class Sum(Closed):
    """An addition in steps."""

    steps: list[Step] = Field(min_length=1, max_length=4)
    sure: bool


KINDS = [Weather, Sum]
THINKS = {"thinking_budget": 200}


def by_instructor(mode):
    client = instructor.from_openai(OPENAI, mode=mode)
    for kind in KINDS:
        messages = [{"role": "user", "content": PROMPT}]
        found = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=kind, max_retries=0, max_tokens=MAX_TOKENS, extra_body=THINKS
        )
        assert isinstance(found, kind), found


def by_instructor_partial():
    client = instructor.from_openai(OPENAI, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": PROMPT}]
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=messages, response_model=Sum, max_tokens=MAX_TOKENS, extra_body=THINKS
        )
    )
    assert len(parts) > 3, parts
    Sum.model_validate(parts[-1].model_dump())


def by_pydantic_ai(model, output):
    provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=BASE, api_key="unused", max_retries=0))
    for kind in KINDS:
        settings = {"max_tokens": MAX_TOKENS}
        if model is OpenAIChatModel:
            settings["extra_body"] = THINKS
        agent = Agent(model(MODEL, provider=provider), output_type=output(kind), retries=0, model_settings=settings)
        found = agent.run_sync(PROMPT).output
        assert isinstance(found, kind), found


def by_langchain(method, responses=False, strict=None):
    more = {} if responses else {"extra_body": THINKS}
    chat = ChatOpenAI(
        model=MODEL, base_url=BASE, api_key="unused", max_retries=0, timeout=120, max_tokens=MAX_TOKENS,
        use_responses_api=responses, **more,
    )
    for kind in KINDS:
        found = chat.with_structured_output(kind, method=method, strict=strict).invoke(PROMPT)
        assert isinstance(found, kind), found


def by_openai(parse):
    for kind in KINDS:
        found = parse(kind)
        assert isinstance(found, kind), found


def chat(kind):
    messages = [{"role": "user", "content": PROMPT}]
    answer = OPENAI.chat.completions.parse(
        model=MODEL, messages=messages, response_format=kind, max_tokens=MAX_TOKENS, extra_body=THINKS
    )
    return answer.choices[0].message.parsed


def responses(kind):
    return OPENAI.responses.parse(model=MODEL, input=PROMPT, text_format=kind, max_output_tokens=MAX_TOKENS).output_parsed


def main():
    modes = [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT]
    checks = [(f"instructor, {mode.name}", lambda mode=mode: by_instructor(mode)) for mode in modes]
    checks += [
        ("instructor, partial", by_instructor_partial),
        ("pydantic-ai, native", lambda: by_pydantic_ai(OpenAIChatModel, NativeOutput)),
        ("pydantic-ai, tool", lambda: by_pydantic_ai(OpenAIChatModel, ToolOutput)),
        ("pydantic-ai, responses", lambda: by_pydantic_ai(OpenAIResponsesModel, NativeOutput)),
        ("pydantic-ai, responses, tool", lambda: by_pydantic_ai(OpenAIResponsesModel, ToolOutput)),
        ("langchain, json_schema", lambda: by_langchain("json_schema")),
        ("langchain, json_schema, strict", lambda: by_langchain("json_schema", strict=True)),
        ("langchain, function_calling", lambda: by_langchain("function_calling")),
        ("langchain, responses", lambda: by_langchain("json_schema", responses=True)),
        ("openai, chat", lambda: by_openai(chat)),
        ("openai, responses", lambda: by_openai(responses)),
    ]
    failed = 0
    for name, check in checks:
        start = time.monotonic()
        try:
            check()
            print(f"ok      {name} ({time.monotonic() - start:.1f} s)")
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {str(error)[:600]}")
    print(f"{len(checks) - failed} of {len(checks)} checks passed (instructor, pydantic-ai, langchain-openai, openai)")
    sys.exit(failed > 0)


main()
