"""Finds a free TCP port on 127.0.0.1. As a program, prints it."""

import random
import socket


def free_port():
    """A port that is free now. It is below the ports that systems give to clients, so that it stays free until it is used."""
    for port in random.sample(range(10_000, 32_768), 1000):
        with socket.socket() as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                found.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise SystemExit("no port of 1,000 is free")


if __name__ == "__main__":
    print(free_port())
