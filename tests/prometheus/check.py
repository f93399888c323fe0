"""Scrapes the demo with Prometheus and runs the queries of the dashboard and the alerts."""

import json
import pathlib
import re
import subprocess
import sys
import urllib.parse
import urllib.request

from free_port import free_port
from waiting import wait_for, wait_until

BINARY, DEPLOY, WORK = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
DRAFT = str(DEPLOY.parent / "models/demo/moestro-demo-dflash")


def get(url, body=None):
    head = {"content-type": "application/json"} if body else {}
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url, data, head), timeout=120) as answer:
        return json.loads(answer.read())


def ask(port, query):
    """The answer of Prometheus to a query."""
    return get(f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}")


def scrapes(port):
    """How often the server was scraped."""
    result = ask(port, "sum(count_over_time(moestro_build_info[1h]))")["data"]["result"]
    return int(result[0]["value"][1]) if result else 0


def queries():
    """Every query as (name, expression, whether it must return data), with Grafana's variables replaced."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$instance", ".+").replace("$__rate_interval", "1m")
            yield f"dashboard: {panel['title']}", expr, True
    for expr in re.findall(r"^ +expr: (.*)$", (DEPLOY / "alerts.yml").read_text(), re.M):
        # A healthy server fires no alert, but the metrics in its expression must exist.
        yield f"alert: {expr}", expr, False
        for name in re.findall(r"\b(moestro_\w+|process_\w+)", expr):
            yield f"metric of an alert: {name}", name, name != "moestro_requests_total"


def main():
    port, own = free_port(), free_port()
    server = subprocess.Popen(
        [BINARY, "serve", "--port", str(port), "--draft-model", DRAFT, "--speculation", "force"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    (WORK / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: moestro, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    prometheus = subprocess.Popen(
        ["prometheus", f"--config.file={WORK}/prometheus.yml", f"--storage.tsdb.path={WORK}/data",
         f"--web.listen-address=127.0.0.1:{own}", "--log.level=error"]
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        wait_for(f"http://127.0.0.1:{own}/-/ready")
        for n in range(8):
            body = {"messages": [{"role": "user", "content": f"What is {n} + 7?"}], "max_tokens": 16}
            get(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        # A rate needs at least two samples of the metrics of these answers.
        before = scrapes(own)
        wait_until("the server is scraped four times", lambda: scrapes(own) >= before + 4)
        count, failures = 0, []
        for name, expr, must_return_data in queries():
            answer = ask(own, expr)
            count += 1
            if answer["status"] != "success" or must_return_data and not answer["data"]["result"]:
                failures.append(f"{name}: {expr}: {answer}")
        assert not failures, "\n".join(failures)
        print(f"prometheus: {count} queries of the dashboard and the alerts answered")
    finally:
        server.kill()
        prometheus.kill()


main()
