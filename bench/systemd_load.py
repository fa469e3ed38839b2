"""Clients of a server that systemd restarts under them: `python -m bench.systemd_load HOST:PORT`, until standard input
ends. Part of bench.systemd_live, run in the machine's network. Prints a line when it begins, then one JSON object.

One thread opens connection after connection and asks SERVER_READY: how each ends is counted. Another runs a model with
the client as anybody would, retries and all.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import Counter

import numpy as np

from prefork.client import Client
from prefork.errors import PreforkError
from prefork.watchdog import QUESTION, answered

TIMEOUT = 60.0  # seconds; a restart is shorter


def ask(host: str, port: int) -> str:
    """How one connection ends: ready, draining (told so), refused, reset or silent."""
    data = b""
    try:
        with socket.create_connection((host, port), TIMEOUT) as sock:
            sock.sendall(QUESTION)
            while (verdict := answered(data)) is None:
                if not (more := sock.recv(4096)):
                    return "draining" if data else "reset"
                data += more
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "silent"
    except ConnectionError:
        return "draining" if data else "reset"
    return "ready" if verdict else "draining"


def main(argv: list[str]) -> int:
    host, _, port = argv[0].rpartition(":")
    over = threading.Event()
    ends: Counter[str] = Counter()
    calls: Counter[str] = Counter()

    def connect() -> None:
        while not over.is_set():
            ends[ask(host, int(port))] += 1

    def infer() -> None:
        image = np.zeros((1, 64), np.float32)
        with Client(argv[0]) as client:
            while not over.is_set():
                try:
                    client.infer("digits", {"image": image}, timeout=TIMEOUT)
                    calls["ok"] += 1
                except PreforkError as e:
                    calls[f"{type(e).__name__}: {e.message}"] += 1

    threads = [threading.Thread(target=deed) for deed in (connect, infer)]
    for thread in threads:
        thread.start()
    print("begun", flush=True)
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"connections": ends, "calls": calls}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
