"""Two replicas and a router: which replica gets a conversation, and which requests fail when one replica stops."""

import collections
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from free_port import free_port
from waiting import wait_for, wait_until

# The name by which clients reach the router. The replicas accept it because of --allowed-host.
SERVICE = "models.example"
BINARY, CONFIG, WORK = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])


def ask(port, topic, turn=0, stream=False, timeout=60):
    """One turn of a conversation: the answer with its usage, or all events of a stream."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {topic} + 7?"}]
    for n in range(turn):
        messages += [{"role": "assistant", "content": "It is so."}, {"role": "user", "content": f"And {n} + {topic}?"}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": stream}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "host": SERVICE},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        if not stream:
            return json.load(answer)
        events = answer.read().decode()
        if not events.endswith("data: [DONE]\n\n"):
            raise ConnectionResetError("a stream ended early")
        return events


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def answered(port):
    """Chats that a replica has answered."""
    lines = re.findall(r'moestro_requests_total\{endpoint="/v1/chat/completions",status="200"\} (\d+)', get(port, "/metrics"))
    return sum(map(int, lines))


def cost_of_the_wrong_one(right, wrong, rounds=5):
    """A turn of a long conversation where its prompt is cached, and at a replica that has never seen it."""
    costs = {"right": [], "wrong": []}
    for n in range(rounds):
        ask(right.port, 1000 + n, 60)
        for name, replica in ("right", right), ("wrong", wrong):
            before = replica.processor_seconds()
            usage = ask(replica.port, 1000 + n, 61)["usage"]
            known = usage["prompt_tokens_details"]["cached_tokens"]
            seconds = replica.processor_seconds() - before
            costs[name].append((seconds, usage["prompt_tokens"] - known, usage["prompt_tokens"]))
    for name, found in costs.items():
        seconds, computed, prompt = sorted(found)[rounds // 2]
        print(f"{name} replica: {computed} of {prompt} prompt tokens computed, {seconds:.2f} s of processor")
    return [sorted(computed for _, computed, _ in found)[rounds // 2] for found in costs.values()]


class Replica:
    def __init__(self, port):
        self.port = port
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [BINARY, "serve", "--port", str(self.port), "--threads", "1", "--max-queue", "64", "--allowed-host", SERVICE],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(f"http://127.0.0.1:{self.port}/health")

    def processor_seconds(self):
        """Processor time used so far."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(router, turns, event):
    """Eight clients send `turns` requests each without pause, half of them for streams. `event` happens after a third
    of the answers. Returns the failures by cause and the number of correct answers."""
    lost, right = collections.Counter(), [0]
    lock = threading.Lock()

    def client(n):
        for turn in range(turns):
            try:
                ask(router, 10 * n + turn % 10, stream=n % 2 == 1)
                with lock:
                    right[0] += 1
            except urllib.error.HTTPError as error:
                with lock:
                    lost[f"status {error.code}"] += 1
            except (OSError, http.client.HTTPException) as error:
                with lock:
                    lost[f"{'stream' if n % 2 else 'body'}: {error}"] += 1

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    while right[0] + lost.total() < 8 * turns / 3 and any(thread.is_alive() for thread in threads):
        time.sleep(0.02)
    event()
    for thread in threads:
        thread.join()
    assert right[0] + lost.total() == 8 * turns, f"a client has failed: {lost}, {right[0]} right"
    return lost, right[0]


def main():
    router, one, two = free_port(), Replica(free_port()), Replica(free_port())
    text = CONFIG.read_text()
    for old, new in [("5400", router), ("5413", one.port), ("5414", two.port)]:
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    (WORK / "haproxy.cfg").write_text(text)
    haproxy = subprocess.Popen(["haproxy", "-q", "-f", str(WORK / "haproxy.cfg")])
    wait_for(f"http://127.0.0.1:{router}/health")

    other = urllib.request.Request(f"http://127.0.0.1:{router}/v1/models", headers={"host": "other.example"})
    try:
        raise SystemExit(f"a foreign name was accepted: {urllib.request.urlopen(other, timeout=60).status}")
    except urllib.error.HTTPError as error:
        assert error.code == 403, error

    # A conversation stays on one replica, and many conversations use both.
    spread = set()
    for topic in range(12):
        before = answered(one.port), answered(two.port)
        for turn in range(3):
            ask(router, topic, turn)
        # A replica counts a request after the client has its answer.
        wait_until("three answers are counted", lambda: answered(one.port) + answered(two.port) == sum(before) + 3)
        after = answered(one.port), answered(two.port)
        gained = after[0] - before[0], after[1] - before[1]
        assert sorted(gained) == [0, 3], f"conversation {topic} went to both: {gained}"
        spread.add(gained)
    assert len(spread) == 2, "one replica got every conversation"
    print("affinity: 12 conversations of 3 turns, each on one replica, both used")

    right, wrong = cost_of_the_wrong_one(one, two)
    assert right * 10 < wrong, (right, wrong)

    # Killed replica: at most one request per client fails, a stream that had begun, and none after that.
    lost, right = load(router, 8, lambda: one.process.kill())
    print(f"killed: {lost.total()} lost of {right + lost.total()}: {dict(lost)}")
    assert lost.total() <= 8, (lost, right)
    one.start()
    wait_until("HAProxy uses the replica again", lambda: [ask(router, topic) for topic in range(12)] and answered(one.port) > 0)

    # Drained replica: no request fails.
    lost, right = load(router, 8, lambda: two.process.send_signal(signal.SIGTERM))
    print(f"drained: {lost.total()} lost of {right + lost.total()}: {dict(lost)}")
    assert not lost, (lost, right)
    for process in (haproxy, one.process, two.process):
        process.kill()


main()
