"""A streamed completion with its times. Used by the benches of several clients."""
import json, time, urllib.request


def ask(url, body, stop=None):
    """Seconds to the first token, total seconds, and the usage. Ends early if the event `stop` is set."""
    request = urllib.request.Request(url, json.dumps(body | {"stream": True, "temperature": 0}).encode(),
                                     {"content-type": "application/json"})
    begun, first, usage = time.perf_counter(), None, None
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                usage = json.loads(line[6:]).get("usage")
            if stop is not None and stop.is_set():
                break
    return first, time.perf_counter() - begun, usage
