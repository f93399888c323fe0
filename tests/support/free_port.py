"""Finds a free TCP port on 127.0.0.1."""

import random
import socket


OWN = []


def free_port():
    """A TCP port that no server has. It is below the ports that systems give to clients, so that it stays free until it
    is used. As long as this process runs, it has the UDP port of the same number, which no server uses, so that this
    function and the one in program.rs return the port to no other process."""
    for port in random.sample(range(10_000, 32_768), 1000):
        own = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                own.bind(("127.0.0.1", port))
                found.bind(("127.0.0.1", port))
                OWN.append(own)
                return port
            except OSError:
                own.close()
    raise SystemExit("no port of 1,000 is free")
