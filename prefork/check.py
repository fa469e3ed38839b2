"""`--check`: prove before a start that every model can be read and has room. Runs in what would be the master.

Each model is read by a real loader process that stops before the work, so no numeric library comes in here.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from prefork import child as children
from prefork import preflight
from prefork.config import Config, ModelConfig
from prefork.generation import LoadError
from prefork.jobs import LoaderJob
from prefork.log import Logger, setup
from prefork.oom import OomWatch
from prefork.shm.owner import Owner


def check(config: Config) -> None:
    """Warnings go to standard error. Raises what preflight refuses, then LoadError naming the first model that could
    not be served, with the loader's exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, nobody could be waited for
    log = setup("error")
    preflight.tell(config, sys.stderr)
    for index, model in enumerate(config.models):
        _check_model(config, index, model, log)


def _check_model(config: Config, index: int, model: ModelConfig, log: Logger) -> None:
    job = LoaderJob(log, model, config.server.shm, Owner.current(), 0, config.server.work_dir, purpose="check")
    watch = OomWatch()
    try:
        loader = children.spawn("loader", index, 0, job, {log.fd})
    except OSError as e:
        raise LoadError(f"model {model.name!r}: its loader cannot be started: {e.strerror}", children.CRASH) from None
    _, status, usage = os.wait4(loader.pid, 0)
    watch.judge(loader, status, time.monotonic(), usage.ru_maxrss * 1024)
    said = next(iter(loader.receive()), {})
    loader.channel.close()
    if status != 0:
        reason = said.get("message") or f"the loader left: {loader.how(status)}"
        raise LoadError(f"model {model.name!r}: {reason}", loader.code(status))
