"""A process that opens one model, as a helper: `python -m bench.opener HOW WHAT NPZ COUNT`.

    plain    WHAT is an ONNX file, opened with ONNX Runtime's defaults
    own      WHAT is the JSON of a segment's reference; opened as a worker without a template opens it
    fork     the same, then COUNT children are forked from it as a template forks workers

It says whose memory is to be measured, on a line of input answers NPZ a few times (each child has done so before it is
first measured, and the template before it forks), says it again, and stays until its input ends.
WHAT may be empty: then nothing is opened, which is what such a process holds without a model.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peer import answer, forked, say

RUNS = 3
Act = Callable[[], None]

os.environ["ORT_DISABLE_TELEMETRY"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when they are imported


def _plain(what: str, inputs: str) -> Act:
    import numpy as np

    from bench.bare import open_plainly

    if not what:
        return lambda: None
    session = open_plainly(Path(what))
    with np.load(inputs) as file:
        feed = {name: file[name] for name in file.files}

    def act() -> None:
        for _ in range(RUNS):
            session.run(None, feed)

    return act


def _segment(what: str) -> Act:
    from prefork import attach
    from prefork.jobs import LoadedModel
    from prefork.shm import segment

    if not what:
        return lambda: None
    ref = segment.SegmentRef.from_dict(json.loads(what))
    opened = attach.open_models([LoadedModel("m", ref, {})], [segment.attach(ref)], 1)
    for one in opened.segments:
        one.verify()

    def act() -> None:
        opened.sessions["m"].warm(RUNS)

    return act


def _forked(act: Act, count: int) -> list[int]:
    """Children that have acted, and end with our input."""
    gc.collect()
    gc.freeze()
    return forked(act, count)


def _acted(act: Act) -> dict[str, Any]:
    act()
    return {"pids": [os.getpid()]}


def main(argv: list[str]) -> int:
    how, what, inputs, count = argv
    act = _plain(what, inputs) if how == "plain" else _segment(what)
    if how != "fork":
        say(pids=[os.getpid()])
        answer(lambda _: _acted(act))
        return 0
    act()
    pids = _forked(act, int(count))
    say(pids=pids)
    os.read(0, 1)
    for pid in pids:
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
