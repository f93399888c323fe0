"""Waits for other programs."""

import time
import urllib.request


def wait_until(what, condition, seconds=120):
    """The limit is for a busy machine: reaching it is a failure."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def wait_for(url):
    """Waits until a server answers with a status of 2xx."""

    def is_answered():
        try:
            return urllib.request.urlopen(url, timeout=10)
        except OSError:
            return False

    wait_until(f"{url} answers", is_answered)
