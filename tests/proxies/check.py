"""One server behind each proxy, with the proxy's file in deploy/: streams, large bodies, clients that leave."""

import http.client
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from free_port import free_port
from waiting import wait_until

NAME = "models.example"
BINARY, DEPLOY, WORK = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])


def is_healthy(port):
    try:
        return request(port, "GET", "/health")[0] == 200
    except OSError:
        return False


def request(port, method, path, body=None, headers={}):
    """The status, the headers and the body of one response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, body, {"host": NAME, "content-type": "application/json", **headers})
    response = connection.getresponse()
    found = response.status, response.headers, response.read()
    connection.close()
    return found


def chat(text, **fields):
    return json.dumps({"messages": [{"role": "user", "content": text}], "temperature": 0, **fields})


def metric(server, name):
    """The value of a metric, 0 if it has none yet."""
    _, _, text = request(server, "GET", "/metrics")
    found = re.search(rf"^{re.escape(name)} (\S+)", text.decode(), re.M)
    return float(found[1]) if found else 0.0


def running(server):
    return metric(server, "moestro_requests_running")


def cancelled(server):
    return metric(server, 'moestro_answers_total{finish_reason="cancelled"}')


def begin_stream(proxy, body):
    """A connection whose response has begun. The client accepts compression."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy, timeout=120)
    headers = {"host": NAME, "content-type": "application/json", "accept-encoding": "gzip"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    assert response.status == 200, (response.status, response.read())
    assert response.headers["content-encoding"] is None, response.headers["content-encoding"]
    return connection, response


def check(name, proxy, server):
    status, _, text = request(proxy, "POST", "/v1/chat/completions", chat("What is 12 + 7?", max_tokens=100))
    assert status == 200 and "19" in json.loads(text)["choices"][0]["message"]["content"], text

    # The page's own requests have its origin.
    origin = {"origin": f"http://{NAME}"}
    status, _, text = request(proxy, "POST", "/v1/chat/completions", chat("What is 1 + 1?", max_tokens=4), origin)
    assert status == 200, text

    # No other check has this prompt, so it is not cached. Its events arrive while it is computed, not
    # together at the end.
    started = time.monotonic()
    long_prompt = chat(f"{name} " + "a b c d " * 1500, max_tokens=2, stream=True, return_progress=True)
    connection, response = begin_stream(proxy, long_prompt)
    times = [time.monotonic() for line in response if line.startswith(b"data: {")]
    connection.close()
    early = (times[-1] - times[0]) / (times[-1] - started)
    assert len(times) > 3 and early > 0.3, f"{len(times)} events, spread over {early:.2f} of the time"

    # Caddy compresses a stream only if its first bytes are long enough, so a common stream is tried, too.
    connection, response = begin_stream(proxy, chat("Tell me a story.", max_tokens=120, stream=True))
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()

    # The server, not the proxy, decides how large a body may be.
    for mebibytes, expected in (30, 200), (33, 413):
        body = " " * (mebibytes << 20) + chat("What is 1 + 1?", max_tokens=2)
        status, _, text = request(proxy, "POST", "/v1/chat/completions", body)
        assert status == expected and json.loads(text), (status, text[:200])

    # A client that leaves frees its row, with a stream and without: the answer is not computed to its end.
    before = cancelled(server)
    long_prompt = chat(f"{name} " + "e f g h " * 3000, max_tokens=2, stream=True, return_progress=True)
    connection, response = begin_stream(proxy, long_prompt)
    response.readline()
    assert running(server) == 1
    response.close()
    connection.close()
    wait_until("the stream of a client that left is cancelled", lambda: cancelled(server) == before + 1 and running(server) == 0)
    connection = http.client.HTTPConnection("127.0.0.1", proxy, timeout=120)
    long_prompt = chat(f"{name} " + "i j k l " * 3500, max_tokens=2)
    connection.request("POST", "/v1/chat/completions", long_prompt, {"host": NAME, "content-type": "application/json"})
    wait_until("the request begins", lambda: running(server) == 1)
    connection.close()
    wait_until("the request of a client that left is cancelled", lambda: cancelled(server) == before + 2 and running(server) == 0)

    # Many requests on one connection.
    connection = http.client.HTTPConnection("127.0.0.1", proxy, timeout=120)
    for _ in range(50):
        connection.request("GET", "/v1/models", headers={"host": NAME})
        response = connection.getresponse()
        assert response.status == 200 and response.read()
    connection.close()
    return early


def nginx(text, port, server):
    """A whole configuration that includes the file of deploy/, with compression for every type."""
    site = WORK / "nginx-site.conf"
    site.write_text(text.replace("127.0.0.1:5480", f"127.0.0.1:{port}").replace("127.0.0.1:5413", f"127.0.0.1:{server}"))
    temporary = "".join(f"{kind}_temp_path {WORK}/nginx-{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    # Other users cannot read the directory of this test.
    user = "user root;" if os.getuid() == 0 else ""
    (WORK / "nginx.conf").write_text(f"""
        {user} daemon off; pid {WORK}/nginx.pid; error_log {WORK}/nginx.log; worker_processes 1;
        events {{}}
        http {{ access_log off; gzip on; gzip_types application/json; {temporary} include {site}; }}
    """)
    return ["nginx", "-e", str(WORK / "nginx.log"), "-c", str(WORK / "nginx.conf")]


def caddy(text, port, server):
    """The file of deploy/ without a certificate and without the administration port."""
    text = text.replace(f"\n{NAME} {{", f"\nhttp://{NAME}:{port} {{\n\tbind 127.0.0.1").replace("127.0.0.1:5413", f"127.0.0.1:{server}")
    (WORK / "Caddyfile").write_text("{\n\tadmin off\n}\n" + text)
    return ["caddy", "run", "--config", str(WORK / "Caddyfile"), "--adapter", "caddyfile"]


def haproxy(text, port, server):
    """The file of deploy/ with one replica."""
    text = re.sub(r"\n    server two .*", "", text)
    text = text.replace("127.0.0.1:5400", f"127.0.0.1:{port}").replace("127.0.0.1:5413", f"127.0.0.1:{server}")
    (WORK / "haproxy.cfg").write_text(text)
    return ["haproxy", "-q", "-f", str(WORK / "haproxy.cfg")]


PROXIES = {"nginx": (nginx, "nginx.conf"), "caddy": (caddy, "Caddyfile"), "haproxy": (haproxy, "haproxy.cfg")}


def main():
    server = free_port()
    command = [BINARY, "serve", "--port", str(server), "--threads", "1", "--allowed-host", NAME]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
    try:
        wait_until("the server answers", lambda: is_healthy(server))
        for name in sys.argv[4:] or PROXIES:
            configure, file = PROXIES[name]
            port = free_port()
            log = open(WORK / f"{name}.out", "w")
            command = configure((DEPLOY / file).read_text(), port, server)
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            wait_until(f"{name} answers", lambda: is_healthy(port) or processes[-1].poll() is not None)
            assert processes[-1].poll() is None, (WORK / f"{name}.out").read_text()
            early = check(name, port, server)
            print(f"{name}: answers, page, bodies of 30 and 33 MiB, a client that leaves; events over {early:.2f} of the time")
    finally:
        for process in processes:
            process.kill()


main()
