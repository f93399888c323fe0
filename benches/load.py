#!/usr/bin/env python3
"""What a crowd costs those who behave: python3 benches/load.py target/release/moestro

Ten clients ask a short question of the demo model, one after the other each, first alone, then beside 500 idle connections,
50 half-sent bodies and 50 clients that read one byte a second. Prints the time to the first token of both, and their ratio.
Alone and beside alternate, so that a busy machine favours neither.
"""
import asyncio, json, resource, subprocess, sys, time

ROUNDS, CLIENTS, QUESTIONS = 4, 10, 20
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
    writers, readers = [], []
    for number in range(600):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writers.append(writer)
        if number < 50:
            writer.write(head("/v1/chat/completions", len(BODY)) + BODY[:20])
        elif number < 100:
            writer.write(head("/v1/completions", len(LONG)) + LONG)
            readers.append(reader)
    async def sip(reader):
        while await reader.read(1):
            await asyncio.sleep(1)
    return writers, [asyncio.ensure_future(sip(reader)) for reader in readers]


def p99(times):
    return sorted(times)[int(len(times) * 0.99)]


async def main(port):
    alone, beside = [], []
    for _ in range(ROUNDS):
        await asyncio.sleep(1)
        alone += await honest(port)
        writers, tasks = await crowd(port)
        # The slow readers' answers are generated first: a queue is no concern of this measurement.
        await asyncio.sleep(4)
        beside += await honest(port)
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.close()
    print(f"p50 {sorted(alone)[len(alone)//2]*1e3:.1f} ms alone, {sorted(beside)[len(beside)//2]*1e3:.1f} ms beside a crowd")
    print(f"p99 {p99(alone)*1e3:.1f} ms alone, {p99(beside)*1e3:.1f} ms beside a crowd, ratio {p99(beside)/p99(alone):.2f}")


resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = subprocess.Popen([sys.argv[1], "serve", "--port", "0", "--max-queue", "128", *sys.argv[2:]], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL)
try:
    asyncio.run(main(json.loads(server.stdout.readline())["port"]))
finally:
    server.kill()
