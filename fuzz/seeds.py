#!/usr/bin/env python3
"""Writes the initial corpus of the fuzz targets, from the test fixtures and the demo model:
python3 fuzz/seeds.py fuzz/corpus"""
import hashlib, json, pathlib, struct, sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = pathlib.Path(sys.argv[1])
DEMO = ROOT / "models/demo/moestro-demo"


def seed(target, data):
    (OUT / target).mkdir(parents=True, exist_ok=True)
    (OUT / target / hashlib.sha1(data).hexdigest()).write_bytes(data)


def checkpoints():
    for name in ("affine4", "mixed", "mxfp4", "nvfp4", "dense4"):
        data = (ROOT / f"tests/fixtures/micro/{name}.safetensors").read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        config = header.pop("__metadata__")["config"].encode()
        text = json.dumps(header).encode()
        shard = struct.pack("<Q", len(text)) + text + data[end:]
        seed("checkpoint", struct.pack("<H", len(config)) + config + shard)


def packs():
    layer = {"file": "layer-000.experts", "stride": 16384, "pieces": [[part * 128, 100] for part in range(9)],
             "sha256": ["0" * 32] * 2, "crc32": [0, 1]}
    pack = {"format": "moestro experts", "version": 2, "source": "@", "identity": "", "layers": [layer]}
    seed("pack", json.dumps(pack).encode())


def warm():
    seed("warm", json.dumps({"identity": "me", "experts": [[0, 1, 0.5], [0, 3, 0.25]]}).encode())


def listings():
    names = ["config.json", "tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors",
             "model.safetensors.index.json"]
    lfs = {"size": 9, "sha256": "a" * 64}
    files = [{"rfilename": name, "size": 9, "blobId": "b" * 40, "lfs": lfs} for name in names]
    seed("listing", json.dumps({"sha": "c" * 40, "siblings": files}).encode())


def requests():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said = [{"role": "user", "content": "Hi"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    bodies = [
        (0, {"messages": said, "tools": [tool], "max_tokens": 4, "stream": True, "logprobs": True}),
        (0, {"messages": said, "response_format": form, "max_tokens": 4}),
        (1, {"prompt": ["Hello", [5, 6]], "echo": True, "logprobs": 2, "max_tokens": 2}),
        (2, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "max_output_tokens": 3}),
        (3, {"messages": said, "max_tokens": 3, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
        (4, {"messages": said}),
        (5, {"prompt": "Hello 123", "return_token_strs": True}),
        (6, {"tokens": [1, 2, 2040]}),
    ]
    for path, body in bodies:
        seed("request", bytes([path]) + json.dumps(body).encode())
    for name, path in (("codex", 2), ("claude-code", 3)):
        seed("request", bytes([path]) + (ROOT / f"tests/fixtures/agents/{name}.json").read_bytes())


def templates():
    for file in (DEMO, ROOT / "models/demo/train", ROOT / "tests/fixtures/chat/features"):
        for template in sorted(file.glob("*.jinja")):
            seed("template", template.read_bytes())


def answers():
    call = "<tool_call>\n<function=f>\n<parameter=n>\n-12\n</parameter>\n</function>\n</tool_call>"
    for text in ("Hello.", "I look.\n</think>\n\n" + call, call + "\n" + call):
        seed("answer", text.encode())


def formats():
    for first in range(10):
        for second in range(12):
            seed("format", bytes([second, first, second, 7 * second]))


for make in (checkpoints, packs, warm, listings, requests, templates, answers, formats):
    make()
