#!/usr/bin/env python3
"""What a crowd costs those who behave: python3 benches/load.py target/release/moestro [ROUNDS]

Ten clients ask a short question of the demo model, one after the other each, first alone, then beside 500 idle connections,
50 half-sent bodies and 50 clients that read one byte a second, then alone again. Prints the time to the first token of each
round, and the medians of the rounds' ratios: a busy machine disturbs both halves of a round alike, and a few rounds not at all.
"""
import asyncio, json, resource, statistics, subprocess, sys, time, urllib.request

ROUNDS, CLIENTS, QUESTIONS = int(sys.argv[2]) if len(sys.argv) > 2 else 15, 10, 20
BODY = json.dumps({"messages": [{"role": "user", "content": "What is 12+7?"}], "max_tokens": 4, "stream": True}).encode()
LONG = json.dumps({"prompt": "One, two,", "max_tokens": 300, "stream": True, "logprobs": 20}).encode()


def head(path, length):
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\n\r\n").encode()


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.perf_counter()
    writer.write(head("/v1/chat/completions", len(BODY)) + BODY)
    status = await reader.readline()
    assert b" 200 " in status, status
    await reader.readuntil(b"data: ")
    first = time.perf_counter() - begun
    await reader.read()
    writer.close()
    return first


async def honest(port):
    async def one():
        return [await ask(port) for _ in range(QUESTIONS)]
    return sum(await asyncio.gather(*(one() for _ in range(CLIENTS))), [])


async def crowd(port):
    """The connections, and the tasks that read from some of them."""
    slow, rest = [], []
    for _ in range(50):
        slow.append(await asyncio.open_connection("127.0.0.1", port, limit=1024))
        slow[-1][1].write(head("/v1/completions", len(LONG)) + LONG)
    async def sip(reader):
        while await reader.read(1):
            await asyncio.sleep(1)
    tasks = [asyncio.ensure_future(sip(reader)) for reader, _ in slow]
    # Their answers are generated first: a queue is no concern of this measurement.
    await asyncio.sleep(1)
    while await asyncio.to_thread(waiting, port):
        await asyncio.sleep(0.2)
    for number in range(550):
        rest.append(await asyncio.open_connection("127.0.0.1", port))
        if number < 50:
            rest[-1][1].write(head("/v1/chat/completions", len(BODY)) + BODY[:20])
    return slow + rest, tasks


def part(times, of):
    return sorted(times)[int(len(times) * of)] * 1e3


def waiting(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        return sum(json.load(answer)["requests"].values())


async def main(port):
    await honest(port)
    ratios = {0.5: [], 0.99: []}
    for number in range(ROUNDS):
        before = await honest(port)
        connections, tasks = await crowd(port)
        beside = await honest(port)
        there = sum(not reader.at_eof() for reader, _ in connections)
        for task in tasks:
            task.cancel()
        for _, writer in connections:
            writer.close()
        await asyncio.sleep(1)
        after = await honest(port)
        line = [f"{there} of 600 still there"]
        for of in ratios:
            alone = (part(before, of) + part(after, of)) / 2
            ratios[of].append(part(beside, of) / alone)
            line.append(f"p{of * 100:.0f} {part(before, of):.1f} {part(beside, of):.1f} {part(after, of):.1f} ms "
                        f"{ratios[of][-1]:.3f}")
        print(number, *line, sep="  ", flush=True)
    for of, all in ratios.items():
        quarters = statistics.quantiles(all, n=4)
        print(f"p{of * 100:.0f} beside a crowd over alone: median {quarters[1]:.3f}, quarters {quarters[0]:.3f} {quarters[2]:.3f}")


resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = subprocess.Popen([sys.argv[1], "serve", "--port", "0", "--max-queue", "128"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL)
try:
    asyncio.run(main(json.loads(server.stdout.readline())["port"]))
finally:
    server.kill()
