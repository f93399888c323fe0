"""Serves on Moestro's default port like a server that has the demo model but fails to answer with it: a test that uses
the default port finds it taken, and a client that asks there fails. Prints a line once it listens. If another program
has the port, that program keeps it busy. Ends with the process that has started it."""

import errno
import http.server
import json
import os
import socketserver
import sys
import threading
import time

PORT = 5413
STATE = {"status": "ok", "version": "0", "model": "moestro-demo", "data": [{"id": "moestro-demo"}]}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, STATE)

    def do_POST(self):
        self.answer(500, {"error": {"message": "a test asked another program's server"}})

    def answer(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class ServerV6(Server):
    address_family = socketserver.socket.AF_INET6


parent = os.getppid()
for server, address in [(Server, "127.0.0.1"), (ServerV6, "::1")]:
    try:
        threading.Thread(target=server((address, PORT), Handler).serve_forever, daemon=True).start()
    except OSError as error:
        # A machine may have no IPv6.
        if server is Server and error.errno != errno.EADDRINUSE:
            raise
        print(f"port {PORT} of {address}: {error.strerror}", file=sys.stderr)
print(f"port {PORT} is in use", flush=True)
while os.getppid() == parent:
    time.sleep(0.2)
