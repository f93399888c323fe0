#!/usr/bin/env python3
"""Waits of many clients, compared with equal parts of the time: python3 benches/fair_share.py BINARY MODEL [--clients 32]
[--seconds 180] [--tokens 16] [--most M] [--fixed] [--cpu] [--port 7502] [-- SERVE ARGS]

Each client is a user with one request at a time, with a prompt of 10 to 5,000 words (1.3 tokens each) and an answer of
TOKENS tokens, or of a random number from TOKENS to M. The length of a prompt is random, or with --fixed the client's own.
First, prompts of several lengths and an answer run alone. They give the work of each request in seconds. The fair share of
a request is its time if every client with a request got an equal part of the throughput, which is the work of all requests
divided by the time of the run. Half a second is added: a request that arrives in a chunk of a prompt waits for the chunk,
which takes about that long. Prints the refusals, the longest waits divided by their fair shares, and the first tokens.
Fails if a request is refused, or if an answer takes more than twice its fair share. MODEL may be synthetic: prompts are
token ids. Other load on the machine changes the throughput during the run, and so the waits: with --cpu, seconds are those
of the server's processor time (Linux).
"""
import argparse, bisect, math, random, statistics, subprocess, sys, threading, time, urllib.error

import timed_stream

parser = argparse.ArgumentParser()
parser.add_argument("binary")
parser.add_argument("model")
parser.add_argument("--clients", type=int, default=32)
parser.add_argument("--seconds", type=float, default=180)
parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
parser.add_argument("--most", type=int, help="tokens of the longest answer (default: --tokens)")
parser.add_argument("--fixed", action="store_true", help="all prompts of a client have the same length")
parser.add_argument("--cpu", action="store_true", help="count the processor time of the server")
parser.add_argument("--port", type=int, default=7502)
parser.add_argument("--rows", help="write the requests to this file as CSV")
parser.add_argument("serve", nargs="*", metavar="SERVE ARGS", help="arguments of the server, after --")
args = parser.parse_intermixed_args()
dice = random.Random(1)
BIAS = {"2038": -100, "2040": -100}  # the demo's ends of an answer
CHUNK = 0.5  # seconds
LENGTHS = [13, 130, 650, 2000, 4000, 6500]


def now():
    # The second is the id of the clock of another process' processor time, as in Linux' posix-timers.h.
    return time.clock_gettime(~server.pid << 3 | 2) if args.cpu else time.monotonic()


def send(tokens, answer, user):
    """Seconds to the first token and to the end, and the number of tokens."""
    prompt = [dice.randrange(100, 2000) for _ in range(tokens)]
    body = {"prompt": prompt, "max_tokens": answer, "user": user, "cache_prompt": False, "logit_bias": BIAS,
            "stream_options": {"include_usage": True}}
    first, whole, usage = timed_stream.ask(f"http://127.0.0.1:{args.port}/v1/completions", body, clock=now)
    return first, whole, usage["completion_tokens"]


def measure_alone():
    """The seconds of prompts of LENGTHS alone, and those of a token of an answer."""
    send(LENGTHS[-1], 1, "alone")
    prompts = [statistics.median(send(tokens, 1, "alone")[0] for _ in range(3)) for tokens in LENGTHS]
    answers = [send(LENGTHS[0], 64, "alone") for _ in range(3)]
    return prompts, statistics.median((whole - first) / (count - 1) for first, whole, count in answers)


def interpolate(prompts, tokens):
    at = min(max(bisect.bisect_left(LENGTHS, tokens), 1), len(LENGTHS) - 1)
    part = (tokens - LENGTHS[at - 1]) / (LENGTHS[at] - LENGTHS[at - 1])
    return prompts[at - 1] + part * (prompts[at] - prompts[at - 1])


def run_client(number, end, found, refused):
    own = random.Random(number)
    words = lambda position: 10 * 500**position
    while time.monotonic() < end:
        position = number / (args.clients - 1) if args.fixed else own.random()
        tokens = round(1.3 * words(position))
        answer = own.randint(args.tokens, args.most or args.tokens)
        asked = now()
        try:
            first, whole, count = send(tokens, answer, f"user {number}")
        except urllib.error.HTTPError as error:
            refused.append(error.code)
            time.sleep(float(error.headers.get("retry-after", 1)))
            continue
        found.append((asked, asked + first, asked + whole, tokens, count))


def fair_times(requests, works):
    """Times of the first tokens and the ends if the clients with a request got equal parts of the throughput. `works` has the
    seconds of each request's prompt and of its answer. `requests` are in the order of their arrival."""
    at, arrived, waiting, times = requests[0][0], 0, {}, {}
    while arrived < len(requests) or waiting:
        least = min((left[0] or left[1] for left in waiting.values()), default=math.inf)
        next_arrival = requests[arrived][0] if arrived < len(requests) else math.inf
        end = min(next_arrival, at + least * len(waiting)) if waiting else next_arrival
        each, at = (end - at) / max(1, len(waiting)), end
        for index, left in list(waiting.items()):
            stage = 0 if left[0] else 1
            left[stage] = 0 if left[stage] - each < 1e-9 else left[stage] - each
            if left[0] == 0:
                times.setdefault(index, [at, at])
            if left == [0, 0]:
                times[index][1] = at
                del waiting[index]
        while arrived < len(requests) and requests[arrived][0] <= at:
            waiting[arrived] = list(works[arrived])
            arrived += 1
    return [times[index] for index in range(len(requests))]


def quantile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def shares(at, more):
    """Waits for the first token (`at` is 1) or the end (2) of each request, divided by the fair share and `more` seconds."""
    return [(request[at] - request[0]) / (times[at - 1] - request[0] + more) for request, times in zip(found, fair)]


server = subprocess.Popen([args.binary, "serve", args.model, "--port", str(args.port), *args.serve], stdout=subprocess.PIPE)
try:
    print(server.stdout.readline().decode().strip()[:200], flush=True)
    prompts, token = measure_alone()
    print("alone:", ", ".join(f"{tokens} tokens {seconds:.3f} s" for tokens, seconds in zip(LENGTHS, prompts)),
          f"a token of an answer {token:.4f} s", flush=True)
    found, refused, end = [], [], time.monotonic() + args.seconds
    threads = [threading.Thread(target=run_client, args=(number, end, found, refused)) for number in range(args.clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
finally:
    server.terminate()
    server.wait()
found.sort()
works = [(interpolate(prompts, tokens), token * count) for _, _, _, tokens, count in found]
span = max(ended for _, _, ended, *_ in found) - found[0][0]
throughput = sum(map(sum, works)) / span
fair = fair_times(found, [[part / throughput for part in work] for work in works])
seconds = [first - asked for asked, first, *_ in found]
short = [wait for wait, (*_, tokens, _) in zip(seconds, found) if tokens < 130]
print(f"{args.clients} clients, {span:.0f} s: {len(found)} answers, {len(refused)} refusals, throughput {throughput:.2f} of alone")
for name, at in ("answers", 2), ("first tokens", 1):
    exact, waits = shares(at, 0), shares(at, CHUNK)
    print(f"{name}: longest {max(waits):.2f} of the fair share and half a second, p99 {quantile(waits, 0.99):.2f}, median "
          f"{statistics.median(waits):.2f}; longest {max(exact):.2f} of the fair share, p99 {quantile(exact, 0.99):.2f}")
print(f"first tokens: p99 {quantile(seconds, 0.99):.2f} s, of prompts under 100 words {quantile(short or [0], 0.99):.2f} s")
if args.rows:
    with open(args.rows, "w") as rows:
        print("asked,first,ended,prompt,answer,fair_first,fair_end", file=rows)
        for request, times in zip(found, fair):
            print(*(f"{value - found[0][0]:.3f}" for value in request[:3]), *request[3:], *(f"{at - found[0][0]:.3f}" for at in times),
                  sep=",", file=rows)
sys.exit(bool(refused) or max(shares(2, CHUNK)) > 2)
