"""From a configuration to a master that runs: the log, what fits on this machine, what another master leaves to us.

Runs in the process that becomes the master, once; nothing here lives on. The loop stands in master.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from prefork import estate, preflight
from prefork.config import Config
from prefork.errors import ConfigError
from prefork.log import setup
from prefork.master import Master


def serve(config: Config, reread: Callable[[], Config]) -> int:
    """Run the server until it is told to stop; the exit code (0 after TERM, INT or QUIT). `reread`: the configuration
    as its sources have it by then, for a reload. Raises PreforkError when it cannot begin."""
    try:
        log = setup(config.log.level, config.log.format, config.log.file, role="master")
    except OSError as e:
        raise ConfigError(f"log.file {str(config.log.file)!r}: {e.strerror}") from None
    for text in config.warnings:
        log.warning(text)
    left = estate.take(os.environ)
    if left is None:
        return Master(config, preflight.prepare(config, log), log, reread).run()
    with left.declined():
        # what the models need is there already, and counted twice it might be refused
        fit = preflight.prepare(dataclasses.replace(config, models=()), log)
        return Master(config, dataclasses.replace(fit, models=config.models), log, reread, left).run()
