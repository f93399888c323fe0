"""Finds a free TCP port on 127.0.0.1. As a program, prints it."""

import socket


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    print(free_port())
