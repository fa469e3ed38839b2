"""One cold start, as a helper process: `python -m bench.cold imports ROLE` or `python -m bench.cold plain FILE NPZ`.

    imports serve   import what the server's processes import on their way to the first answer, one after the other
    imports plain   import what `plain` imports
    plain           open FILE as ONNX Runtime does by default, on one thread, and answer NPZ once

It says one line when that is done; the bench times it from before the process was started.
"""

from __future__ import annotations

import os
import sys

from bench.peer import say

os.environ["ORT_DISABLE_TELEMETRY"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when they are imported


def _imports(role: str) -> None:
    if role == "serve":
        import prefork.cli
        import prefork.loader
        import prefork.master
        import prefork.worker

        modules = [prefork.cli, prefork.master, prefork.loader, prefork.worker]
    else:
        import numpy
        import onnxruntime

        modules = [numpy, onnxruntime]
    say(imported=[module.__name__ for module in modules])


def _plain(path: str, inputs: str) -> None:
    import numpy
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    with numpy.load(inputs) as file:
        session.run(None, {name: file[name] for name in file.files})
    say(answered=True)


if __name__ == "__main__":
    if sys.argv[1] == "imports":
        _imports(sys.argv[2])
    else:
        _plain(*sys.argv[2:])
