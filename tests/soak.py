#!/usr/bin/env python3
"""Soak test of a server: python3 tests/soak.py BINARY [SECONDS, default 300]

Eight clients send chats, responses, messages, tools, schemas, random prompts and invalid requests, disconnect, alternate
between two models and send SIGHUP. Greedy answers must not change. Memory, file descriptors and threads must not grow.
At the end SIGTERM under load must stop the server in time with exit code 0.
"""
import http.client, json, os, pathlib, random, shutil, signal, subprocess, sys, tempfile, threading, time

binary, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 300
work = pathlib.Path(tempfile.mkdtemp())
demo = pathlib.Path(__file__).parent.parent / "models/demo/moestro-demo"
shutil.copytree(demo, work / "models/second")
config = work / "moestro.toml"
config.write_text('keep-alive = "20s"\n')
environment = dict(os.environ, XDG_CACHE_HOME=str(work / "cache"), HF_HUB_CACHE=str(work / "hub"))
server = subprocess.Popen(
    [binary, "--config", str(config), "serve", "--port", "0", "--memory-limit", "512M", "--models-dir", str(work / "models"),
     "--max-queue", "64"], stdout=subprocess.PIPE, stderr=open(work / "log", "w"), env=environment)
port = json.loads(server.stdout.readline())["port"]

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
ASK = [{"role": "user", "content": "What is 12+7?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
KINDS = {
    "chat": ("/v1/chat/completions", {"messages": ASK, "max_tokens": 60}),
    "stream": ("/v1/chat/completions", {"messages": ASK, "max_tokens": 60, "stream": True}),
    "tool": ("/v1/chat/completions", {"messages": WEATHER, "tools": [TOOL], "max_tokens": 80}),
    "schema": ("/v1/chat/completions", {"messages": ASK, "max_tokens": 200, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
    "responses": ("/v1/responses", {"input": "What is 12+7?", "max_output_tokens": 60}),
    "messages": ("/v1/messages", {"messages": ASK, "max_tokens": 60}),
    "text": ("/v1/completions", {"prompt": "One, two, three,", "max_tokens": 20}),
}
INVALID = [b"{", b"[]", b'{"messages": 3}', b'{"messages": [], "max_tokens": -1}', b'{"messages": [{"role": "user"}]}', b"\xff\x00"]


def send(path, body, timeout=120):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", path, body, {"content-type": "application/json"})
    return connection


def stable_part(answer):
    """The part of an answer that must not change."""
    if "choices" in answer:
        choice = answer["choices"][0]
        message = choice.get("message", {})
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        return [choice.get("text"), message.get("content"), calls, choice["finish_reason"]]
    if "output" in answer:
        return [part["text"] for item in answer["output"] for part in item.get("content") or []]
    return [block.get("text") for block in answer["content"]]


expected, counts, failures, lock = {}, {}, [], threading.Lock()


def count(name):
    with lock:
        counts[name] = counts.get(name, 0) + 1


def once(dice):
    what = dice.random()
    if what < 0.1:
        answer = send("/v1/chat/completions", dice.choice(INVALID)).getresponse()
        assert answer.status == 400, answer.status
        return count("invalid")
    if what < 0.2:
        # Prompts that no other request has, so each takes new memory of the prompt cache.
        prompt = [dice.randrange(100, 1600) for _ in range(dice.randint(1, 200))]
        body = {"prompt": prompt, "max_tokens": dice.randint(1, 16), "n": dice.randint(1, 2)}
        answer = send("/v1/completions", json.dumps(body)).getresponse()
        assert answer.status == 200 and json.load(answer)["choices"], answer.status
        return count("random")
    name = dice.choice(list(KINDS))
    path, body = KINDS[name]
    body = dict(body, temperature=0)
    if dice.random() < 0.15:
        body["model"] = dice.choice(["moestro-demo", "second"])
    connection = send(path, json.dumps(body))
    if what < 0.35:
        time.sleep(dice.random() * 0.05)
        connection.sock.close()
        return count("disconnected")
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, f"{name}: {answer.status} {text}"
    if body.get("stream"):
        assert text.rstrip().endswith("data: [DONE]"), text[-200:]
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        result = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    else:
        result = stable_part(json.loads(text))
    if name == "responses":
        # The server stores up to a thousand responses of 15 KB. They would hide a leak.
        connection.request("DELETE", "/v1/responses/" + json.loads(text)["id"])
        assert connection.getresponse().status == 200
    if name == "schema" and result[3] == "stop":
        assert isinstance(json.loads(result[1])["n"], int), result
    with lock:
        assert expected.setdefault(name, result) == result, f"{name}: {result}, before: {expected[name]}"
    count(name)


def client(number, end):
    dice = random.Random(number)
    while time.time() < end and not failures:
        try:
            once(dice)
        except Exception as error:
            if time.time() < end:
                failures.append(f"client {number}: {error!r}")


def usage():
    """RSS in MiB, file descriptors and threads of the server."""
    proc = pathlib.Path(f"/proc/{server.pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, len(list((proc / "fd").iterdir())), int(status["Threads"])


def wait_until_unloaded():
    for _ in range(240):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        if json.load(connection.getresponse())["model"] is None:
            break
        time.sleep(0.5)
    else:
        failures.append("the model stays loaded")
    time.sleep(12)  # Idle blocking threads exit after ten seconds.


def has_grown(before, after):
    return after[0] > before[0] * 1.1 + 2 or after[1] > before[1] + 2 or after[2] > before[2]


def run(end):
    clients = [threading.Thread(target=client, args=(number, end)) for number in range(8)]
    for each in clients:
        each.start()
    while time.time() < end and not failures:
        time.sleep(5)
        server.send_signal(signal.SIGHUP)
    for each in clients:
        each.join(150)
        if each.is_alive():
            failures.append("a client hangs")


try:
    run(time.time() + min(20, seconds / 4))
    wait_until_unloaded()
    before = usage()
    run(time.time() + seconds)
    wait_until_unloaded()
    # A busy machine ends connections and threads late.
    for _ in range(20):
        after = usage()
        if not has_grown(before, after):
            break
        time.sleep(2)
    print("requests:", dict(sorted(counts.items())))
    print("loads:", (work / "log").read_text().count("loaded "))
    print("MiB, descriptors, threads when idle: %.1f, %d, %d before; %.1f, %d, %d after" % (*before, *after))
    if has_grown(before, after):
        failures.append("memory, descriptors or threads grew")
    clients = [threading.Thread(target=client, args=(number, time.time() + 1), daemon=True) for number in range(8)]
    for each in clients:
        each.start()
    time.sleep(1)
    server.send_signal(signal.SIGTERM)
    code = server.wait(60)
    if code != 0:
        failures.append(f"SIGTERM under load: exit code {code}")
finally:
    server.kill()
    if failures:
        print((work / "log").read_text()[-3000:], file=sys.stderr)
    shutil.rmtree(work)
if failures:
    sys.exit("\n".join(failures))
print("ok")
