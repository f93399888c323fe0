#!/usr/bin/env python3
"""Checks that neighbours do not change an answer: python3 benches/mixes.py BINARY MODEL [--mixes 1000] [--clients 16]
[--seed 1] [--seconds S] [--port 7501] [-- SERVE ARGS]

Requests with different prompts, lengths and sampling settings are answered alone first. Then random mixes of 1 to
CLIENTS of them are sent at random times within a few milliseconds. The text and the log-probabilities of each answer
must be those of the request alone. MODEL may be synthetic: prompts are token ids. Fails if an answer differs.
"""
import argparse, json, random, subprocess, sys, threading, time, urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("binary")
parser.add_argument("model")
parser.add_argument("--mixes", type=int, default=1000)
parser.add_argument("--clients", type=int, default=16)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--seconds", type=float, default=1e9, help="stop earlier, after this time")
parser.add_argument("--port", type=int, default=7501)
parser.add_argument("serve", nargs="*", metavar="SERVE ARGS", help="arguments of the server, after --")
args = parser.parse_intermixed_args()
dice = random.Random(args.seed)


def request():
    body = {
        "prompt": [dice.randrange(100, 2000) for _ in range(dice.choice([1, 2, 7, 16, 17, 31, 33, 70, 140]))],
        "max_tokens": dice.randrange(1, 13),
        "logprobs": 1,
        "temperature": dice.choice([0, 0, 1]),
        "seed": dice.randrange(1 << 30),
        "cache_prompt": dice.choice([True, False]),
    }
    return body | dice.choice([{}, {"top_k": 20}, {"top_p": 0.8}])


def ask(body):
    url = f"http://127.0.0.1:{args.port}/v1/completions"
    sent = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(sent) as answer:
        choice = json.load(answer)["choices"][0]
    return choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]


def mix(picked, found):
    """Sends the requests, each after a delay, and adds their answers to `found`."""
    delays = [dice.choice([0, dice.random() * 0.03]) for _ in picked]

    def one(at):
        time.sleep(delays[at])
        found[at] = ask(picked[at])

    threads = [threading.Thread(target=one, args=(at,)) for at in range(len(picked))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


server = subprocess.Popen([args.binary, "serve", args.model, "--port", str(args.port), *args.serve], stdout=subprocess.PIPE)
try:
    server.stdout.readline()
    pool = [request() for _ in range(80)]
    alone = [ask(body) for body in pool]
    begun, mixes, answers, wrong = time.monotonic(), 0, 0, 0
    while mixes < args.mixes and time.monotonic() - begun < args.seconds:
        picks = [dice.randrange(len(pool)) for _ in range(dice.randrange(1, args.clients + 1))]
        found = {}
        mix([pool[pick] for pick in picks], found)
        for at, pick in enumerate(picks):
            answers += 1
            if found.get(at) != alone[pick]:
                wrong += 1
                print(f"mix {mixes}: {pool[pick]} gives {found.get(at)}, alone {alone[pick]}"[:1000], flush=True)
        mixes += 1
    print(f"{mixes} mixes, {answers} answers, {wrong} differ, {time.monotonic() - begun:.1f} s", flush=True)
finally:
    server.terminate()
    server.wait()
sys.exit(wrong > 0)
