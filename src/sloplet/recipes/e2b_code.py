"""sloplet/e2b-code: sloplet/code-all as E2B's code interpreter knows it, which speaks R, Java and Deno, too."""

from __future__ import annotations

from ..build.image import Image
from . import e2b_base
from .code import WARM as WARM

NEEDS = "sloplet/code-all"

#: Templates for E2B start its code server by this name, and wait until that is healthy. Here the server is outside: all
#: that is left to do inside is to say so.
START = """set -e
mkdir -p /root/.jupyter
cat >/root/.jupyter/start-up.sh <<'SCRIPT'
#!/bin/sh
exec python3 -c '
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        there = self.path == "/health"
        body = json.dumps("OK" if there else "cells are run from outside, by the address of the sandbox").encode()
        self.send_response(200 if there else 501)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("", 49999), Answers).serve_forever()
'
SCRIPT
chmod 755 /root/.jupyter/start-up.sh"""


def image() -> Image:
    return e2b_base.image(NEEDS, "sloplet/e2b-code").user("root").run(START).user("user")
