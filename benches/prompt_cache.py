#!/usr/bin/env python3
"""Measures how much of an agent's conversation a server computes twice: prompt_cache.py URL CONVERSATION.json
[--answers recorded|own|own-without-reasoning] [--max-tokens 8] [--no-cache | --beside] [--llama URL]

CONVERSATION is {"tools": [...], "turns": [[message, ...], ...]}. Turn k has the messages that the client sends in its
k-th request. With --answers own, the server's own answers replace the recorded ones.

Prints for each turn: the prompt's tokens; those that are new compared with all earlier prompts (by /tokenize); those
that the server computed (moestro_prompt_tokens_total{source="computed"}, counted at the forward pass); the time to the
first token; and the bytes written to disk so far. --beside repeats each turn without the cache and prints its time,
too. --llama sends the tokens of each turn to a llama-server with the same vocabulary, generates one token, and prints
the number of tokens that it computed."""
import argparse, csv, json, re, sys, time, urllib.request

p = argparse.ArgumentParser()
p.add_argument("url"); p.add_argument("conversation"); p.add_argument("--answers", default="recorded", choices=["recorded", "own", "own-without-reasoning"])
p.add_argument("--max-tokens", type=int, default=8); p.add_argument("--no-cache", action="store_true"); p.add_argument("--beside", action="store_true"); p.add_argument("--llama"); p.add_argument("--turns", type=int, default=1000); p.add_argument("--from-turn", type=int, default=0)
a = p.parse_args()


def ask(path, body=None, url=None):
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request((url or a.url) + path, data, {"content-type": "application/json"}))


def metric(name):
    return int(re.search(rf"{name} (\d+)", ask("/metrics").read().decode())[1])


def computed():
    return metric(r'moestro_prompt_tokens_total\{source="computed"\}')


def stream(messages, cache):
    """Yields the chunks of an answer, each with its time."""
    body = {"messages": messages, "tools": tools, "max_tokens": a.max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    if not cache:
        body["cache_prompt"] = False
    for line in ask("/v1/chat/completions", body):
        if line.startswith(b"data: {"):
            yield json.loads(line[6:]), time.perf_counter()


def pieces(chunk):
    return [(c["delta"].get("content") or "", c["delta"].get("reasoning_content") or "") for c in chunk["choices"]]


talk = json.load(open(a.conversation)); tools = talk["tools"]
own, earlier, out = {}, [], csv.writer(sys.stdout)
out.writerow(["turn", "prompt", "new", "computed", "cached", "seconds_to_first_token", "disk_written"] + ["without_cache", "ratio"] * a.beside + ["llama_computed", "llama_seconds"] * bool(a.llama))
sums, llama = [0, 0, 0, 0.0], [0, 0.0]
for k, messages in enumerate(talk["turns"][: a.turns]):
    if a.answers != "recorded":
        # The server's answers replace the recorded ones. Tool results still follow recorded calls.
        messages = [own.get(i, m) for i, m in enumerate(messages)]
    ids = json.load(ask("/tokenize", {"messages": messages, "tools": tools, "add_generation_prompt": True}))["tokens"]
    shared = 0
    for other in earlier:
        n = next((i for i, (x, y) in enumerate(zip(ids, other)) if x != y), min(len(ids), len(other)))
        shared = max(shared, n)
    earlier.append(ids)
    if k < a.from_turn:
        continue
    before, begin, first, text, thought = computed(), time.perf_counter(), None, "", ""
    cached = 0
    for chunk, now in stream(messages, not a.no_cache):
        for piece, reason in pieces(chunk):
            if first is None and (piece or reason):
                first = now - begin
            text, thought = text + piece, thought + reason
        if chunk.get("usage"):
            cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    first = first or time.perf_counter() - begin
    done = computed() - before
    answer = {"role": "assistant", "content": text}
    if a.answers == "own":
        answer["reasoning_content"] = thought
    own[len(messages)] = {**(talk["turns"][k + 1][len(messages)] if k + 1 < len(talk["turns"]) else {}), **answer} if a.answers == "own" else answer
    if a.answers == "own-without-reasoning" and k + 1 < len(talk["turns"]):
        own[len(messages)] = {key: value for key, value in {**talk["turns"][k + 1][len(messages)], **answer}.items() if key != "reasoning_content"}
    row = [k, len(ids), len(ids) - shared, done, cached, f"{first:.3f}", metric("moestro_prompt_cache_disk_written_bytes_total")]
    if a.beside:
        begin = time.perf_counter()
        whole = next((now - begin for chunk, now in stream(messages, False) if any(any(piece) for piece in pieces(chunk))), time.perf_counter() - begin)
        row += [f"{whole:.3f}", f"{first / whole:.4f}"]
    if a.llama:
        begin = time.perf_counter()
        said = json.load(ask("/completion", {"prompt": ids, "n_predict": 1, "temperature": 0, "cache_prompt": True}, a.llama))
        took = time.perf_counter() - begin
        row += [said["timings"]["prompt_n"], f"{took:.3f}"]
        llama = [llama[0] + said["timings"]["prompt_n"], llama[1] + took]
    out.writerow(row)
    sys.stdout.flush()
    sums = [sums[0] + len(ids), sums[1] + len(ids) - shared, sums[2] + done, sums[3] + first]
print(f"# {sums[0]} tokens sent, {sums[1]} new, {sums[2]} computed: {sums[2] / max(sums[1], 1):.3f} times; {sums[3]:.1f} s to first tokens", file=sys.stderr)
if a.llama:
    print(f"# llama-server: {llama[0]} computed: {llama[0] / max(sums[1], 1):.3f} times; {llama[1]:.1f} s", file=sys.stderr)
