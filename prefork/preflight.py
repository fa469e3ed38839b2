"""Before anything is made: does what the configuration needs (needs.py) fit into what there is (facts.py)?

Runs in the master and in `--check`. What cannot work is refused with the arithmetic; what may not fit is a warning, and
the loader asks again with better figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TextIO

from prefork import facts, needs
from prefork.config import Config
from prefork.errors import ConfigError, PreforkError, ResourceExhausted, SegmentFull
from prefork.facts import UNLIMITED, Facts, Room, mib
from prefork.log import Logger
from prefork.needs import Needs

MORE_FILES = "raise it (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=)"
Level = Literal["refusal", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to say: what is needed, what was found, what to do. A refusal is raised as `error`."""

    level: Level
    message: str
    error: type[PreforkError] = ConfigError


def prepare(config: Config, log: Logger) -> Config:
    """Log what was found; the configuration that fits. Raises the first refusal: ConfigError or SegmentFull."""
    wanted, found = needs.of(config), facts.read(config.server.shm)
    findings = list(examine(wanted, found))
    refuse(findings)
    for finding in findings:
        (log.warning if finding.level == "warning" else log.info)("preflight", finding=finding.message)
    return fit(config, wanted, found)


def tell(config: Config, stream: TextIO) -> None:
    """Print what was found, a line each. Raises as `prepare` does."""
    findings = list(examine(needs.of(config), facts.read(config.server.shm)))
    for finding in findings:
        if finding.level != "refusal":
            print(f"prefork-serve: {finding.level}: {finding.message}", file=stream)
    refuse(findings)


def examine(wanted: Needs, found: Facts) -> Iterator[Finding]:
    """Everything there is to say."""
    yield from _segments(wanted, found)
    yield from _memory(wanted, found)
    yield from _files(wanted, found)
    yield from _tasks(wanted, found)
    yield from _limits(wanted, found)
    yield from _mappings(wanted, found)
    yield from _cores(found)


def grow(config: Config, workers: int) -> None:
    """May a running server have so many workers? Raises ResourceExhausted when the master has no descriptors for them,
    of which one that replaces a worker would notice too late."""
    wanted = needs.of(replace(config, server=replace(config.server, workers=workers)))
    for finding in _master_files(wanted, facts.open_files()):
        raise ResourceExhausted(finding.message)


def refuse(findings: Iterable[Finding]) -> None:
    """Raises the first refusal as the error that it names."""
    for finding in findings:
        if finding.level == "refusal":
            raise finding.error(finding.message)


def fit(config: Config, wanted: Needs, found: Facts) -> Config:
    """The configuration with as many connections of a worker as it has descriptors for. Beyond max_connections a client
    is told so; beyond RLIMIT_NOFILE the loop can only close its connection without a word."""
    return replace(config, limits=replace(config.limits, max_connections=connections(wanted, found)))


def connections(wanted: Needs, found: Facts) -> int:
    """What a worker's other descriptors leave, max_connections at most."""
    return min(wanted.connections, found.open_files - wanted.worker_files)


def _bounds(
    subject: str, least: int, likely: int, room: Room, error: type[PreforkError] = ConfigError
) -> Iterator[Finding]:
    """A refusal below `least`, a warning below `likely`, both bytes."""
    if room.left < least:
        yield Finding("refusal", f"{subject} at least {mib(least)}, {room.found}; {room.advice}", error)
    elif room.left < likely:
        yield Finding("warning", f"{subject} up to {mib(likely)}, {room.found}; {room.advice}")


def _segments(wanted: Needs, found: Facts) -> Iterator[Finding]:
    for room in found.shm:
        told = list(_bounds("room: the models' segments take", wanted.least, wanted.likely, room, SegmentFull))
        yield from told
        if not told:
            yield from _bounds("room: for a reload the models' segments take", 0, 2 * wanted.likely, room)


def _memory(wanted: Needs, found: Facts) -> Iterator[Finding]:
    count = wanted.workers
    least = wanted.least + needs.LEAST_MEMORY + count * needs.LEAST_WORKER_MEMORY
    # the loader is gone when workers come
    passing = max(needs.LOADER_COPIES * wanted.largest, count * needs.LIKELY_WORKER_MEMORY)
    likely = wanted.likely + needs.LIKELY_MEMORY + passing
    for room in found.memory:
        yield from _bounds(f"memory: segments and {count} worker(s) take", least, likely, room, SegmentFull)
    if found.commit is not None:
        least = needs.LEAST_MEMORY + count * needs.LEAST_COMMIT
        likely = needs.LIKELY_MEMORY + count * (needs.LIKELY_COMMIT + wanted.likely)
        yield from _bounds(f"memory: {count} worker(s) are promised", least, likely, found.commit)


def _master_files(wanted: Needs, hard: int) -> Iterator[Finding]:
    if hard < wanted.master_files:
        yield Finding(
            "refusal",
            f"open files: the master needs {wanted.master_files} ({needs.MASTER_FILES} own, {needs.SLOT_FILES} for "
            f"each of {wanted.workers} worker(s), {needs.MODEL_FILES} for each of {wanted.models} model(s), "
            f"{needs.CONTROL_FILES} for prefork-ctl), the hard RLIMIT_NOFILE is {hard}; {MORE_FILES}, or fewer workers",
        )


def _files(wanted: Needs, found: Facts) -> Iterator[Finding]:
    hard, asked = found.open_files, wanted.connections
    yield from _master_files(wanted, hard)
    left = connections(wanted, found)
    own = (
        f"{wanted.worker_files} ({needs.WORKER_FILES} own, {wanted.listening_files} for listening and segments, "
        f"{needs.SPARE_FILES} spare)"
    )
    if left < wanted.least_connections:
        yield Finding(
            "refusal",
            f"open files: a worker needs {own} and {wanted.least_connections} connections, the hard RLIMIT_NOFILE is "
            f"{hard}; {MORE_FILES}",
        )
    elif left < asked:
        yield Finding(
            "warning",
            f"open files: max_connections {asked} becomes {left}, for a worker needs {own} beside and the hard "
            f"RLIMIT_NOFILE is {hard}; {MORE_FILES} to {wanted.worker_files + asked}, or lower max_connections",
        )


def _tasks(wanted: Needs, found: Facts) -> Iterator[Finding]:
    for room in found.tasks:
        if room.left < wanted.tasks:
            yield Finding(
                "refusal",
                f"processes: {wanted.workers} worker(s) and all else are {wanted.tasks} processes and threads, "
                f"{room.where} leaves {room.left}; {room.advice}, or fewer workers",
            )


def _limits(wanted: Needs, found: Facts) -> Iterator[Finding]:
    """What a single process may have."""
    loading = needs.LOADER_COPIES * wanted.largest
    room = Room("RLIMIT_AS", found.address_space, "raise it (ulimit -v, LimitAS=)", whole=True)
    least, likely = needs.LEAST_SPACE + wanted.least, needs.LIKELY_SPACE + loading + wanted.likely
    yield from _bounds("address space: a process maps", least, likely, room)
    room = Room("RLIMIT_DATA", found.data, "raise it (ulimit -d, LimitDATA=)", whole=True)
    likely = needs.LIKELY_DATA + max(loading, wanted.likely)
    yield from _bounds("private memory: a process has", needs.LEAST_DATA, likely, room)
    if wanted.posix:
        advice = "raise it (ulimit -f, LimitFSIZE=), or use --shm sysv"
        room = Room("RLIMIT_FSIZE", found.file_size, advice, whole=True)
        yield from _bounds("file size: segments are files, of", wanted.least, wanted.likely, room)


def _mappings(wanted: Needs, found: Facts) -> Iterator[Finding]:
    most, likely = found.max_map_count, needs.LIKELY_MAPS + needs.MODEL_MAPS * wanted.models
    if most < likely:
        refused = most < needs.LEAST_MAPS
        count = f"at least {needs.LEAST_MAPS}" if refused else f"up to {likely}"
        yield Finding(
            "refusal" if refused else "warning",
            f"mappings: a process has {count}, vm.max_map_count is {most}; sysctl -w vm.max_map_count="
            f"{max(65530, likely)}",
        )


def _cores(found: Facts) -> Iterator[Finding]:
    if found.core or found.core_piped:
        size = "of any size" if found.core >= UNLIMITED else f"up to {mib(found.core)}"
        where = "go to a program (kernel.core_pattern)" if found.core_piped else f"are written, {size} (RLIMIT_CORE)"
        yield Finding(
            "info",
            f"cores {where}: segments are left out of them, private memory with the requests in it is not; "
            "ulimit -c 0 (LimitCORE=0) turns off those that are written",
        )
