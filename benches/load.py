#!/usr/bin/env python3
"""Effect of slow clients on others: python3 benches/load.py target/release/moestro [ROUNDS]

Ten clients send short requests to the demo model: first alone, then next to 500 idle connections, 50 incomplete bodies
and 50 clients that read one byte per second, then alone again. Prints the time to the first token of each round, and
the median of the ratios over all rounds. Other load on the machine affects both parts of a round alike.
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
    start = time.perf_counter()
    writer.write(head("/v1/chat/completions", len(BODY)) + BODY)
    status = await reader.readline()
    assert b" 200 " in status, status
    await reader.readuntil(b"data: ")
    first = time.perf_counter() - start
    await reader.read()
    writer.close()
    return first


async def measure(port):
    async def one():
        return [await ask(port) for _ in range(QUESTIONS)]
    return sum(await asyncio.gather(*(one() for _ in range(CLIENTS))), [])


async def open_slow_clients(port):
    """The slow connections, and the tasks that read from some of them."""
    slow, rest = [], []
    for _ in range(50):
        slow.append(await asyncio.open_connection("127.0.0.1", port, limit=1024))
        slow[-1][1].write(head("/v1/completions", len(LONG)) + LONG)
    async def read_slowly(reader):
        while await reader.read(1):
            await asyncio.sleep(1)
    tasks = [asyncio.ensure_future(read_slowly(reader)) for reader, _ in slow]
    # Wait until their answers are generated: this benchmark does not measure the queue.
    await asyncio.sleep(1)
    while await asyncio.to_thread(waiting, port):
        await asyncio.sleep(0.2)
    for number in range(550):
        rest.append(await asyncio.open_connection("127.0.0.1", port))
        if number < 50:
            rest[-1][1].write(head("/v1/chat/completions", len(BODY)) + BODY[:20])
    return slow + rest, tasks


def quantile(times, of):
    return sorted(times)[int(len(times) * of)] * 1e3


def waiting(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        return sum(json.load(answer)["requests"].values())


async def main(port):
    await measure(port)
    ratios = {0.5: [], 0.99: []}
    for number in range(ROUNDS):
        before = await measure(port)
        connections, tasks = await open_slow_clients(port)
        loaded = await measure(port)
        connected = sum(not reader.at_eof() for reader, _ in connections)
        for task in tasks:
            task.cancel()
        for _, writer in connections:
            writer.close()
        await asyncio.sleep(1)
        after = await measure(port)
        line = [f"{connected} of 600 still connected"]
        for of in ratios:
            alone = (quantile(before, of) + quantile(after, of)) / 2
            ratios[of].append(quantile(loaded, of) / alone)
            line.append(f"p{of * 100:.0f} {quantile(before, of):.1f} {quantile(loaded, of):.1f} {quantile(after, of):.1f} ms "
                        f"{ratios[of][-1]:.3f}")
        print(number, *line, sep="  ", flush=True)
    for of, all in ratios.items():
        quarters = statistics.quantiles(all, n=4)
        print(f"p{of * 100:.0f} with slow clients divided by alone: median {quarters[1]:.3f}, quarters {quarters[0]:.3f} {quarters[2]:.3f}")


resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = subprocess.Popen([sys.argv[1], "serve", "--port", "0", "--max-queue", "128"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL)
try:
    asyncio.run(main(json.loads(server.stdout.readline())["port"]))
finally:
    server.kill()
