"""`prefork-serve prepare` and `inspect`: models prepared without being served. Runs in what would be the master.

Each model is prepared by a real loader process, so no numeric library comes in here. `prepare` fills the cache and
fails when that cannot be; `inspect` shows what a start would choose, from the cache when it is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

from prefork import child as children
from prefork import workdir
from prefork.child import Child
from prefork.config import Config, ModelConfig
from prefork.errors import ConfigError
from prefork.generation import LoadError
from prefork.jobs import MANIFEST, CachePlace, LoaderJob
from prefork.log import Logger, setup
from prefork.oom import OomWatch
from prefork.shm.owner import Owner
from prefork.workdir import WorkDir

Purpose = Literal["prepare", "inspect"]


def prepare(config: Config, purpose: Purpose) -> Iterator[dict[str, Any]]:
    """What each model's loader found, one after the other: its manifest, with `origin` (file or cache) and `prepare_s`.

    Raises ConfigError without a cache to fill, LoadError naming the model, with the loader's exit code."""
    if purpose == "prepare" and config.server.cache_dir is None:
        raise ConfigError(
            f"server.cache_dir ({config.sources['server.cache_dir']}): prepare needs a folder, found none"
        )
    try:
        log = setup(config.log.level, config.log.format, config.log.file, role=purpose)
    except OSError as e:
        raise ConfigError(f"log.file {str(config.log.file)!r}: {e.strerror}") from None
    for text in config.warnings:
        log.warning(text)
    signal.signal(signal.SIGTERM, _leave)
    workdir.sweep(config.server.work_dir)
    work = WorkDir(config.server.work_dir, Owner.current())
    try:
        for index, model in enumerate(config.models):
            yield _prepare(config, purpose, index, model, work, log)
    finally:
        work.remove()


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _prepare(
    config: Config, purpose: Purpose, index: int, model: ModelConfig, work: WorkDir, log: Logger
) -> dict[str, Any]:
    place, server = work.sub(f"{purpose}-{index}"), config.server
    cache = CachePlace.of(server)
    job = LoaderJob(log, model, server.shm, Owner.current(), 0, place, purpose=purpose, cache=cache)
    watch = OomWatch()
    loader = children.spawn("loader", index, 0, job, {log.fd})
    try:
        _, status, usage = os.wait4(loader.pid, 0)
    except BaseException:
        loader.kill(signal.SIGKILL)
        os.waitpid(loader.pid, 0)
        raise
    finally:
        log.erase()
    said = _last_word(loader)
    watch.judge(loader, status, time.monotonic(), usage.ru_maxrss * 1024)
    if status != 0:
        reason = said.get("message") or f"the loader left: {loader.how(status)}"
        raise LoadError(f"model {model.name!r}: {reason}", loader.code(status))
    return {**json.loads((place / MANIFEST).read_bytes()), **said["report"]}


def _last_word(loader: Child) -> dict[str, Any]:
    with loader.channel:
        return next(reversed(loader.receive()), {})
