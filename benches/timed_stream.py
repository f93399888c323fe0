"""A streamed completion with its times. Used by the benches of several clients."""
import json, time, urllib.request


def ask(url, body, stop=None, clock=time.perf_counter):
    """Seconds to the first token, total seconds, and the usage. Ends early if the event `stop` is set. `clock` returns the
    seconds."""
    request = urllib.request.Request(url, json.dumps(body | {"stream": True, "temperature": 0}).encode(),
                                     {"content-type": "application/json"})
    begun, first, usage = clock(), None, None
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or clock() - begun
                usage = json.loads(line[6:]).get("usage")
            if stop is not None and stop.is_set():
                break
    return first, clock() - begun, usage
