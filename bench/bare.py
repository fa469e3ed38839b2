"""ONNX Runtime without a server, as a helper process of one thread: `python -m bench.bare FILE NPZ MODE ...`.

    hold            open FILE, run a few times, stay
    preload N       open FILE, fork N children that run a few times and stay: a pre-loading fork server
    loop OUTPUT...  open FILE; {"seconds": s} runs it for that long and says how often, and what CPU that took
    raw OUTPUT...   as loop, calling the bound C++ object's run without the Python class around it

FILE is an ONNX file opened with the defaults, or as the folder of a prepared model says. NPZ holds the inputs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from bench.peer import answer, forked, say

RUNS = 3  # before memory is measured: the arena has its size then
CALIBRATE = 0.05  # seconds of runs between two looks at the clock


def open_plainly(path: Path, *, as_is: bool = False) -> ort.InferenceSession:
    """A session of one thread. `as_is`: the graph is optimised already, and packed weights lie beside it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if as_is:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: ort.InferenceSession, feed: dict[str, Any]) -> None:
    for _ in range(RUNS):
        session.run(None, feed)


def _preload(session: ort.InferenceSession, feed: dict[str, Any], count: int) -> None:
    pids = forked(lambda: _run(session, feed), count)
    say(pids=pids)
    os.read(0, 1)
    for pid in pids:
        os.waitpid(pid, 0)


def _loop(session: ort.InferenceSession, feed: dict[str, Any], outputs: list[str], *, raw: bool) -> None:
    run: Any = getattr(session, "_sess", session).run if raw else session.run
    run(outputs, feed, None)
    began = time.perf_counter()
    run(outputs, feed, None)
    batch = max(1, int(CALIBRATE / (time.perf_counter() - began)))

    def act(what: dict[str, Any]) -> dict[str, Any]:
        count, start, cpu = 0, time.perf_counter(), time.process_time()
        end = start + what["seconds"]
        while (now := time.perf_counter()) < end:
            for _ in range(batch):
                run(outputs, feed, None)
            count += batch
        return {"runs": count, "seconds": now - start, "cpu": time.process_time() - cpu}

    say(ready=True)
    answer(act)


def main(argv: list[str]) -> int:
    path, inputs, mode, *rest = argv
    with np.load(inputs) as file:
        feed = {name: file[name] for name in file.files}
    session = open_plainly(Path(path), as_is=Path(path).name == "prepared.onnx")
    if mode in ("loop", "raw"):
        _loop(session, feed, rest or [output.name for output in session.get_outputs()], raw=mode == "raw")
    elif mode == "preload":
        _preload(session, feed, int(rest[0]))
    else:
        _run(session, feed)
        say(ready=True)
        answer(lambda what: what)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
