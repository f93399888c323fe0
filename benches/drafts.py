#!/usr/bin/env python3
"""Compares decoding with a draft and without: drafts.py MOESTRO MODEL DRAFT [--rounds 6] [--threads 2] [--tokens 110]
[--serve "--more flags of all servers"] [--widths 3,5,7] [--starts 1]

Starts one server per setting and keeps all of them loaded: off, again (a second server with off), auto, and force with
each number of drafted tokens in --widths. Each round asks every server the same greedy questions, in an order that
rotates with the round.

Two identical servers differ by 1 or 2 % as long as they run, because of the placement of their memory. `again` shows
this difference. --starts is the number of times that all servers are restarted, with --rounds rounds each.

Prints one row per round and setting: answered tokens, the seconds from the first to the last token of each answer, and
the CPU seconds of the whole request (Linux), summed. The comments at the end give the median over the rounds of the
seconds divided by those of `off`, the CPU seconds of all rounds together, and the accepted tokens per cycle."""
import argparse, json, re, statistics, subprocess, time, urllib.request

p = argparse.ArgumentParser()
p.add_argument("binary"); p.add_argument("model"); p.add_argument("draft")
p.add_argument("--rounds", type=int, default=6); p.add_argument("--threads", default="2"); p.add_argument("--tokens", type=int, default=110)
p.add_argument("--starts", type=int, default=1); p.add_argument("--serve", default=""); p.add_argument("--widths", default="3,5,7")
a = p.parse_args()
QUESTIONS = ["Tell me a story about Paul and a dragon.", "Give me Python code: a function maximum(a, b) that returns the larger one.", "What is quantization?",
             "Count from 49 to 119 by 10.", "Give me 5 instruments, please.", "Tell me a story about a fox.", "Sort these numbers: 97, 41, 49, 42."]
WITH = ["--draft-model", a.draft]
SETTINGS = {"off": ["--draft-model", "off"], "again": ["--draft-model", "off"], "auto": WITH, **{f"force {n}": WITH + ["--speculation", "force", "--num-draft-tokens", str(n)] for n in a.widths.split(",") if n}}


class Server:
    def __init__(self, args):
        self.process = subprocess.Popen([a.binary, "serve", a.model, "--port", "0", "--device", "cpu", "--threads", a.threads, *a.serve.split(), *args],
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.url = f"http://127.0.0.1:{json.loads(self.process.stdout.readline())['port']}"

    def ask(self, question):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": a.tokens, "stream": True,
                "stream_options": {"include_usage": True}, "cache_prompt": False}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        first, tokens, used = None, None, self.cpu_seconds()
        for line in urllib.request.urlopen(request):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if first is None and event["choices"] and any(event["choices"][0]["delta"].get(k) for k in ("content", "reasoning_content")):
                first = time.perf_counter()
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return tokens, time.perf_counter() - first, self.cpu_seconds() - used

    def cpu_seconds(self):
        # The clock of another process, as clock_getcpuclockid computes it. It counts threads that have ended, too.
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def metric(self, name):
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}.* (\S+)$", text, re.M))

    def kinds(self):
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        return set(re.findall(r'^moestro_draft_tokens_total\{.*kind="(\w+)"', text, re.M))


def run(start, ratios, totals, counts):
    servers = {name: Server(args) for name, args in SETTINGS.items()}
    try:
        for server in servers.values():
            server.ask(QUESTIONS[0])
        for n in range(a.rounds):
            order = list(servers); order = order[(start + n) % len(order):] + order[:(start + n) % len(order)]
            sums = {name: [0, 0.0, 0.0] for name in order}
            for question in QUESTIONS:
                for name in order:
                    sums[name] = [x + y for x, y in zip(sums[name], servers[name].ask(question))]
            for name in servers:
                print(f"{start * a.rounds + n + 1},{name},{sums[name][0]},{sums[name][1]:.4f},{sums[name][2]:.4f}", flush=True)
                totals[name] += sums[name][2]
                for index in (0, 1):
                    ratios[name][index].append(sums[name][index + 1] / sums["off"][index + 1])
        for name, server in servers.items():
            counts[name][0] += server.metric("moestro_draft_cycles_total")
            kinds.update(server.kinds())
            counts[name][1] += server.metric(r'moestro_draft_tokens_total\{.*outcome="accepted"')
    finally:
        for server in servers.values():
            server.process.kill()
            server.process.wait()


print("round,setting,tokens,seconds,cpu_seconds")
ratios, totals, counts = {name: [[], []] for name in SETTINGS}, dict.fromkeys(SETTINGS, 0.0), {name: [0, 0] for name in SETTINGS}
kinds = set()
for start in range(a.starts):
    run(start, ratios, totals, counts)
for name, (cycles, accepted) in counts.items():
    wall, cpu = (statistics.median(ratio) for ratio in ratios[name])
    print(f"# {name}: seconds divided by off {wall:.3f}, CPU seconds {cpu:.3f}, all rounds together {totals[name] / totals['off']:.3f}" + (f", {accepted / cycles:.2f} accepted in each of {cycles:.0f} cycles" if cycles else ""))
# A model without an MTP head uses prompt lookup.
print(f"# draft kinds: {', '.join(sorted(kinds)) or 'none'}")
