#!/usr/bin/env python3
"""Cost of structured output per decode step: mask.py BINARY MODEL [--tokens 192] [--rounds 9] [--threads 2]
[--cores 0,1] [--form records]...

Serves MODEL and requests answers of about equal length without a schema and with one (a round is plain, schema, schema,
plain), for each of several schemas, and for calls of 40 strict tools. It measures decode seconds
(moestro_decode_seconds, from the first token to the last) and CPU seconds (user and system time of the server,
including the prompt), per token. Answers are drawn at temperature 1 from random weights, so nearly every token reaches
a new grammar state. A trained model reaches fewer."""
import argparse, csv, json, os, re, statistics, subprocess, sys, urllib.request

p = argparse.ArgumentParser()
p.add_argument("binary"); p.add_argument("model"); p.add_argument("--tokens", type=int, default=192); p.add_argument("--rounds", type=int, default=9)
p.add_argument("--threads", default="2"); p.add_argument("--cores"); p.add_argument("--temperature", type=float, default=1); p.add_argument("--form", action="append")
a = p.parse_args()

text = {"type": "string"}
record = {"type": "object", "required": ["name", "age", "kind", "tags"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "kind": {"enum": ["person", "company", "other"]}, "tags": {"type": "array", "items": text, "minItems": 3}}}
FORMS = {"a long string": {"type": "string", "minLength": 4000},
         "strings": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 300},
         "records": {"type": "array", "items": record, "minItems": 200},
         "numbers": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1000}, "minItems": 500}}
FORMS = {name: {"type": "object", "properties": {"a": form}, "required": ["a"], "additionalProperties": False} for name, form in FORMS.items()}
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "strict": True, "parameters": form}} for i, form in enumerate(list(FORMS.values())[1:] * 14)][:40]
# With "auto", a grammar applies from the first tag of a call; before, it looks for that tag.
CHOICES = {f"40 tools, {choice}": choice for choice in ("required", "auto")}
NAMES = [name for name in [*FORMS, *CHOICES] if not a.form or name in a.form]

pin = ["taskset", "-c", a.cores] if a.cores else []
server = subprocess.Popen([*pin, a.binary, "serve", a.model, "--port", "0", "--threads", a.threads, "--prompt-cache", "64M", "--draft-model", "off"],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
port = json.loads(server.stdout.readline())["port"]
url = f"http://127.0.0.1:{port}"


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url + path, data, {"content-type": "application/json"})).read().decode()
    except urllib.error.HTTPError as refused:
        sys.exit(refused.read().decode())


def decoded():
    return float(re.search(r"moestro_decode_seconds_sum(?:\{[^}]*\})? (\S+)", ask("/metrics"))[1])


def processor():
    fields = open(f"/proc/{server.pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name, seed, with_form):
    body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": a.tokens, "temperature": a.temperature, "top_p": 1, "top_k": 0,
            "seed": seed, "enable_thinking": False}
    if name in CHOICES:
        body |= {"tools": TOOLS, "tool_choice": CHOICES[name] if with_form else "none"}
    elif with_form:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": FORMS[name]}}
    before = decoded(), processor()
    tokens = json.loads(ask("/v1/chat/completions", body))["usage"]["completion_tokens"]
    # Random text may end early. Shorter answers would measure the prompt.
    if tokens < a.tokens / 2:
        return measure(name, seed + 1000, with_form)
    return [(x - y) / tokens * 1e3 for x, y in zip((decoded(), processor()), before)]


out = csv.writer(sys.stdout, lineterminator="\n")
out.writerow(["form", "round", "plain_ms", "form_ms", "ratio", "plain_cpu_ms", "form_cpu_ms", "cpu_ratio"])
try:
    for name in NAMES:
        measure(name, 0, False)
        measure(name, 0, True)
        ratios = []
        for round in range(a.rounds):
            runs = [measure(name, round * 4 + i + 1, with_form) for i, with_form in enumerate([False, True, True, False])]
            plain = [runs[0][i] + runs[3][i] for i in range(2)]
            formed = [runs[1][i] + runs[2][i] for i in range(2)]
            ratios.append([y / x for x, y in zip(plain, formed)])
            row = [[plain[i] / 2, formed[i] / 2, ratios[-1][i]] for i in range(2)]
            out.writerow([name, round + 1, *(f"{x:.4f}" for part in row for x in part)]); sys.stdout.flush()
        out.writerow([name, "median", "", "", *(x for i in range(2) for x in (f"{statistics.median(r[i] for r in ratios):.4f}", "", ""))][:8])
finally:
    server.terminate(); server.wait()
