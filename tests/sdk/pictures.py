"""Checks a running server with the vision-language checkpoint of the tests through OpenAI's chat completions and
Responses, Anthropic's Messages, LiteLLM and LangChain: each sends a red and a blue picture and gets answers that depend
on them. The server runs with `--thinking off`.

    python pictures.py http://127.0.0.1:5413/v1
"""

import base64
import os
import struct
import sys
import zlib

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Otherwise it downloads a price list.

import anthropic
import litellm
import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

BASE = sys.argv[1]
ROOT = BASE.removesuffix("/v1")
OPENAI = openai.OpenAI(base_url=BASE, api_key="unused", max_retries=0, timeout=120)
ANTHROPIC = anthropic.Anthropic(base_url=ROOT, api_key="unused", max_retries=0, timeout=120)
MODEL = OPENAI.models.list().data[0].id
litellm.telemetry = False
TOKENS = 8
# The checkpoint has random weights: its answers mean nothing, but they depend on the picture.
QUESTION = "Which colour?"


def png(red, green, blue):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((red, green, blue)) * 64) * 64
    header = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


PICTURES = [png(255, 0, 0), png(0, 0, 255), png(255, 0, 0)]


def url(data):
    return f"data:image/png;base64,{data}"


def parts(data):
    return [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url(data)}}]


def openai_chat(data):
    messages = [{"role": "user", "content": parts(data)}]
    answer = OPENAI.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=TOKENS
    )
    return answer.choices[0].message.content


def openai_responses(data):
    content = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": url(data), "detail": "auto"}]
    answer = OPENAI.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=TOKENS
    )
    return [getattr(part, "text", None) for item in answer.output for part in item.content or []]


def openai_function_output(data):
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": url(data)}]}
    answer = OPENAI.responses.create(
        model=MODEL, input=[{"role": "user", "content": QUESTION}, call, output], temperature=0, max_output_tokens=TOKENS
    )
    return [getattr(part, "text", None) for item in answer.output for part in item.content or []]


def source(data):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def anthropic_messages(data):
    content = [source(data), {"type": "text", "text": QUESTION}]
    answer = ANTHROPIC.messages.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=TOKENS, extra_body={"temperature": 0}
    )
    return [block.text for block in answer.content]


def anthropic_tool_result(data):
    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {"file_path": "/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [source(data)]}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = ANTHROPIC.messages.create(
        model=MODEL, messages=messages, max_tokens=TOKENS, extra_body={"temperature": 0}
    )
    return [block.text for block in answer.content]


def langchain(data):
    chat = ChatOpenAI(model=MODEL, base_url=BASE, api_key="unused", temperature=0, max_tokens=TOKENS)
    return chat.invoke([HumanMessage(content=parts(data))]).content


def lite(data):
    answer = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=BASE,
        api_key="unused",
        messages=[{"role": "user", "content": parts(data)}],
        temperature=0,
        max_tokens=TOKENS,
    )
    return answer.choices[0].message.content


for ask in (
    openai_chat,
    openai_responses,
    openai_function_output,
    anthropic_messages,
    anthropic_tool_result,
    langchain,
    lite,
):
    red, blue, again = (ask(data) for data in PICTURES)
    assert red and red == again, f"{ask.__name__}: {red!r} and {again!r} for one picture"
    assert red != blue, f"{ask.__name__}: {red!r} for both pictures"
    print(f"ok      pictures.py: {ask.__name__}")
