#!/usr/bin/env python3
"""Several clients at the same time: python3 benches/parallel.py BINARY MODEL [--clients 4] [--logprobs 0] [--short 50]
[--port 7500] [-- SERVE ARGS]

Prints the tokens per second of one client and of several that decode at the same time, and the time to the first token
of short requests: on an idle server, and while a long prompt is evaluated and a long answer is generated. MODEL may be
synthetic: prompts are token ids.
"""
import argparse, random, statistics, subprocess, threading, time

import timed_stream

parser = argparse.ArgumentParser()
parser.add_argument("binary")
parser.add_argument("model")
parser.add_argument("--clients", type=int, default=4)
parser.add_argument("--tokens", type=int, default=64, help="tokens per answer of the decoding clients")
parser.add_argument("--logprobs", type=int, help="ask for the log-probabilities of this many alternatives")
parser.add_argument("--short", type=int, default=50, help="short requests")
parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt")
parser.add_argument("--port", type=int, default=7500)
parser.add_argument("serve", nargs="*", metavar="SERVE ARGS", help="arguments of the server, after --")
args = parser.parse_intermixed_args()
dice = random.Random(1)


def ids(count):
    return [dice.randrange(100, 2000) for _ in range(count)]


def ask(prompt, tokens, stop=None):
    """Seconds to the first token, total seconds, and the number of tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream_options": {"include_usage": True}, "cache_prompt": False}
    if args.logprobs is not None:
        body["logprobs"] = args.logprobs
    first, seconds, usage = timed_stream.ask(f"http://127.0.0.1:{args.port}/v1/completions", body, stop)
    return first, seconds, usage["completion_tokens"] if usage else 0


def together(clients):
    """Tokens per second of this many clients, from the first token of all to the last."""
    results, threads, begin = [], [], time.perf_counter()

    def client(prompt):
        started = time.perf_counter() - begin
        first, whole, count = ask(prompt, args.tokens)
        results.append((started + first, started + whole, count))

    for _ in range(clients):
        threads.append(threading.Thread(target=client, args=(ids(16),)))
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    firsts, ends, counts = zip(*results)
    return (sum(counts) - 1) / (max(ends) - min(firsts))


def quantile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def keep_asking(stop, prompt, tokens):
    while not stop.is_set():
        ask(ids(prompt), tokens, stop)


server = subprocess.Popen([args.binary, "serve", args.model, "--port", str(args.port), *args.serve], stdout=subprocess.PIPE)
try:
    print(server.stdout.readline().decode().strip()[:200], flush=True)
    together(1)
    rates = [(together(1), together(args.clients)) for _ in range(3)]
    one, many = (statistics.median(rate) for rate in zip(*rates))
    print(f"1 client {one:.1f} tokens/s, {args.clients} clients {many:.1f} tokens/s together: {many / one:.2f} times", flush=True)
    idle = [ask(ids(50), 1)[0] for _ in range(max(5, args.short // 5))]
    print(f"short request on an idle server: median {statistics.median(idle):.3f} s, longest {max(idle):.3f} s", flush=True)
    stop = threading.Event()
    loads = [(args.prompt, 1), (16, 800)]
    threads = [threading.Thread(target=keep_asking, args=(stop, *load), daemon=True) for load in loads]
    [thread.start() for thread in threads]
    time.sleep(3)
    busy = []
    for _ in range(args.short):
        busy.append(ask(ids(50), 1)[0])
        time.sleep(dice.random())
    stop.set()
    print(f"next to a prompt of {args.prompt} tokens and an answer of 800: median {statistics.median(busy):.3f} s, "
          f"p99 {quantile(busy, 0.99):.3f} s", flush=True)
finally:
    server.terminate()
    server.wait()
