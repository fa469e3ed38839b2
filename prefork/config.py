"""The configuration as frozen values: every key, its default and the reason for it. Built once, then only read.

`layers.load` builds a Config from a TOML file, the environment and flags; this file only says what there is. Used by
the master, whose children inherit it over the fork. Imports options only, so it stays free of any numeric library.
conf/prefork.toml is the same list for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from prefork.options import (
    AUTO,
    AUTO_OPTIONAL_PATH,
    AUTO_PATH,
    BIND,
    FLAG,
    METRIC,
    NAME,
    OPTIONAL_BIND,
    OPTIONAL_CLASS,
    OPTIONAL_PATH,
    PATH,
    Key,
    choice,
    key,
    number,
    seconds,
    size,
    whole,
)

# Keys of a model that only quantize = "auto" heeds.
SEARCH = ("accuracy_budget", "eval", "calibration", "metric", "min_speedup", "quantize_seconds", "handler")

DAY = 86400.0
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Processes, sockets and places. All paths are resolved and absolute."""

    # Loopback: the server asks nobody who they are, so reaching it from elsewhere is a decision, not an accident.
    bind: str = field(
        default="127.0.0.1:7070",
        metadata=key(BIND, "TCP address; :PORT is every interface, port 0 lets the kernel choose", "HOST:PORT"),
    )
    # Beside TCP because it costs nothing and a client on the same machine saves the TCP stack.
    unix: Path | None = field(metadata=key(AUTO_OPTIONAL_PATH, 'Unix socket; "" for none', "PATH"))
    control: Path = field(metadata=key(AUTO_PATH, "socket that prefork-ctl talks to, mode 0600", "PATH"))
    # A folder of this user's own: systemd's, else the login session's, else one in /tmp that carries the user id.
    runtime_dir: Path = field(metadata=key(AUTO_PATH, "folder of the sockets", "DIR"))
    # The loader writes the optimised model here before it is copied into shared memory; gone when the loader is.
    work_dir: Path = field(metadata=key(AUTO_PATH, "scratch folder of the loader, about twice the model's size", "DIR"))
    # On: preparing again what was prepared before costs seconds to minutes, and the folder is this user's own.
    cache_dir: Path | None = field(
        metadata=key(AUTO_OPTIONAL_PATH, 'folder of prepared models; "" for none', "DIR"),
    )
    # Forty models of the size of BERT-base in int8; those used longest ago make room.
    cache_size: int = field(
        default=10 * GIB, metadata=key(size(0, 2**50), "bytes that prepared models may take in cache_dir", "SIZE")
    )
    # One a CPU that quota and cpuset allow: a worker computes on one thread, more of them only take turns.
    workers: int = field(default=0, metadata=key(whole(0, 1024), "worker processes; 0 is one for each allowed CPU"))
    # Off: the kernel places well where others compute too; a core of one's own helps on a machine of one's own.
    pin: Literal["off", "cores"] = field(
        default="off", metadata=key(choice("off", "cores"), "keep each worker to physical cores of its own", "HOW")
    )
    # posix maps packed weights straight from the segment, sysv (no path) costs each worker more private memory.
    shm: Literal["posix", "sysv"] = field(
        default="posix", metadata=key(choice("posix", "sysv"), "kind of shared memory segment", "KIND")
    )
    # A worker forked from a process that has the models open is ready in milliseconds and shares what opening cost.
    template: Literal["auto", "off"] = field(
        default="auto",
        metadata=key(choice("auto", "off"), "workers forked from open models, or each opening its own", "WHEN"),
    )
    # A burst waits here for its worker; the kernel caps it at net.core.somaxconn (4096 by default).
    backlog: int = field(default=1024, metadata=key(whole(1, 65535), "queue of each listening socket, connections"))
    # As long as a request may take by default, and what service managers commonly wait before they kill.
    graceful_timeout: float = field(
        default=30.0, metadata=key(seconds(0, DAY), "time for accepted requests to end when stopping", "SECONDS")
    )
    # Above the longest single run of the loop: the heartbeat comes from the loop, which an inline run holds up.
    worker_timeout: float = field(
        default=30.0, metadata=key(seconds(0, DAY), "silence after which a worker is killed; 0 is never", "SECONDS")
    )
    # A file may be half written, or a test; who wants it says so.
    watch: float = field(
        default=0.0,
        metadata=key(
            seconds(0, DAY), "look so often whether a model's file has changed, and reload it; 0 is never", "S"
        ),
    )
    # Nothing of ours grows; this is for user code that does.
    recycle_age: float = field(
        default=0.0, metadata=key(seconds(0, 365 * DAY), "replace a worker of this age; 0 is never", "SECONDS")
    )
    recycle_requests: int = field(
        default=0, metadata=key(whole(0, 2**53), "replace a worker after so many requests; 0 is never")
    )
    recycle_private: int = field(
        default=0, metadata=key(size(0, 2**50), "replace a worker with so much memory of its own; 0 is never", "SIZE")
    )
    # An incident is no time to look for the old file; one more segment in memory, used by no process.
    keep_previous: bool = field(
        default=True, metadata=key(FLAG, "keep the models served before the last reload, for a rollback", "BOOL")
    )
    # Supervisors know their child; a file that can be stale is made only when asked for.
    pid_file: Path | None = field(default=None, metadata=key(OPTIONAL_PATH, "file to hold the master's pid", "PATH"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What a client may ask of one worker. Each is refused by its name here, with a canonical code."""

    # 64 MiB is a batch of 100 RGB images of 224 x 224 in FP32. A frame's length is 32 bits on the wire.
    max_frame_bytes: int = field(
        default=64 * MIB, metadata=key(size(1024, 2**32 - 1), "largest frame taken or sent", "SIZE")
    )
    # A decoder's past keys and values make about 130; each costs an object before anything is checked.
    max_tensors: int = field(default=256, metadata=key(whole(1, 65535), "tensors in a request"))
    # numpy held 32 dimensions until its version 2 (64 since); no ONNX operator needs as many.
    max_dims: int = field(default=32, metadata=key(whole(1, 64), "dimensions of a tensor"))
    # One descriptor each: within the hard limit that systemd and container engines set, tens of MB of buffers.
    max_connections: int = field(default=4096, metadata=key(whole(1, 1_000_000), "connections of a worker"))
    # Enough to fill the pipe of one client with small models; the rest of the worker stays for the others.
    max_in_flight_per_connection: int = field(
        default=128, metadata=key(whole(1, 1_000_000), "unanswered requests of a connection")
    )
    # At 5 ms a request the last of 512 waits 2.5 s: longer queues only turn overload into time-outs.
    max_in_flight: int = field(default=512, metadata=key(whole(1, 1_000_000), "unanswered requests of a worker"))
    # Counting requests does not bound memory; four frames of the largest size do.
    max_in_flight_bytes: int = field(
        default=256 * MIB, metadata=key(size(1024, 2**46), "bytes of unanswered requests of a worker", "SIZE")
    )
    # A request without a deadline would hold its place for ever when something is wrong.
    default_timeout_ms: int = field(
        default=30_000, metadata=key(whole(1, 86_400_000), "deadline of a request that names none", "MS")
    )
    # A deadline is a promise to give the place back; ten minutes covers a large batch on a slow machine.
    max_timeout_ms: int = field(
        default=600_000, metadata=key(whole(1, 86_400_000), "longest deadline; a longer one is cut to it", "MS")
    )
    # Pooled connections of a client are idle for long and cost little; max_connections bounds them.
    idle_timeout: float = field(
        default=0.0, metadata=key(seconds(0, DAY), "close a connection idle for this long; 0 is never", "SECONDS")
    )
    # A peer that drips bytes holds a buffer of up to max_frame_bytes: 64 MiB in 30 s is 18 Mbit/s.
    read_timeout: float = field(
        default=30.0, metadata=key(seconds(0.001, DAY), "a frame that has begun must be whole within", "SECONDS")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """How a worker runs a model."""

    # Measured for each model at warm-up: a hand-off costs about 25 us, more than a tiny model, far less than a big one.
    run_in: Literal["auto", "inline", "thread"] = field(
        default="auto",
        metadata=key(choice("auto", "inline", "thread"), "where a run happens: on the loop or in a thread", "WHERE"),
    )
    # One thread a worker gives the most requests a second, and a process of one thread may be forked when ready.
    threads: int = field(default=1, metadata=key(whole(1, 1024), "threads within one run"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What the server tells of itself, by a process of its own."""

    # Off: a fixed second port would keep a second server on this machine from starting, and costs a process.
    metrics_bind: str = field(
        default="",
        metadata=key(OPTIONAL_BIND, "TCP address of /metrics, /healthz and /readyz; port 0 as for bind", "HOST:PORT"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged, how, and where."""

    # One line for each event in the life of a process; debug adds lines for connections.
    level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata=key(choice("debug", "info", "warning", "error"), "least severe level written", "LEVEL")
    )
    # Read by a person until somebody collects it.
    format: Literal["console", "json"] = field(
        default="console", metadata=key(choice("console", "json"), "for people or for machines", "FORMAT")
    )
    # Off: a line costs about as much CPU as a request of a tiny model; one in a hundred tells as much as all.
    requests: float = field(
        default=0.0, metadata=key(number(0, 1), "share of the requests that get a line; 0 is none", "RATE")
    )
    # Standard error, which containers and systemd collect.
    file: Path | None = field(
        default=None, metadata=key(OPTIONAL_PATH, "file appended to; none is standard error", "PATH")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model to serve. All paths are absolute."""

    name: str = field(metadata=key(NAME, "the name clients call it by", "NAME"))
    path: Path = field(metadata=key(PATH, "the ONNX file", "PATH"))
    # What is served must have kept its accuracy and gained speed on this host, measured; else it is what was given.
    quantize: Literal["auto", "none", "int8", "fp16"] = field(
        default="auto", metadata=key(choice("auto", "none", "int8", "fp16"), "form of the weights", "FORM")
    )
    # Half a percent of FP32's figure: a loss that few evaluations can tell from chance.
    accuracy_budget: float = field(
        default=0.005, metadata=key(number(0, 1), "relative loss of accuracy that auto may cost; 0 leaves fp32", "LOSS")
    )
    # Only the owner knows what the model is for; without, agreement with FP32 stands in.
    eval: Path | None = field(
        default=None, metadata=key(OPTIONAL_PATH, "npz of inputs, with labels or without, to judge by", "PATH")
    )
    # Ranges of activations cannot be guessed from random inputs, so convolutions stay FP32 without it or eval.
    calibration: Path | None = field(
        default=None, metadata=key(OPTIONAL_PATH, "npz of typical inputs, for the ranges of activations", "PATH")
    )
    # Follows from the labels and the outputs for most models.
    metric: str = field(default="auto", metadata=key(METRIC, "how auto judges answers", "METRIC"))
    # Below it the gain is within the noise of a measurement, and other answers for nothing are a bad bargain.
    min_speedup: float = field(
        default=1.05, metadata=key(number(0, 1000), "times as fast as fp32 that a form must be; 0 is any", "TIMES")
    )
    # A start that waits longer looks hung; what was chosen is kept in cache_dir.
    quantize_seconds: float = field(
        default=120.0, metadata=key(seconds(0, DAY), "time after which auto begins no further candidate", "SECONDS")
    )
    # Most models need no code of their own; what is named here is imported and run.
    handler: str = field(
        default="", metadata=key(OPTIONAL_CLASS, "class that may yield calibration batches", "MODULE:CLASS")
    )
    # Zeros of the model's own shapes do for most models; ids or lengths that must be sensible need real inputs.
    warmup: Path | None = field(
        default=None, metadata=key(OPTIONAL_PATH, "npz of inputs for the first runs, one array an input", "PATH")
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything. `sources` says for each `section.key` and `models.NAME` where its value came from: `default`,
    `FILE:LINE`, the environment variable or the flag. `warnings`: what was given and changes nothing, for people."""

    server: ServerConfig
    limits: LimitsConfig
    compute: ComputeConfig
    telemetry: TelemetryConfig
    log: LogConfig
    models: tuple[ModelConfig, ...]
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()


Section = ServerConfig | LimitsConfig | ComputeConfig | TelemetryConfig | LogConfig
SECTIONS: dict[str, type[Section]] = {
    "server": ServerConfig,
    "limits": LimitsConfig,
    "compute": ComputeConfig,
    "telemetry": TelemetryConfig,
    "log": LogConfig,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a section with its three spellings and its default (AUTO when it depends on the environment)."""

    section: str
    name: str
    key: Key
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flat(self) -> str:
        """The key without its section; unique, because those of [log] keep theirs."""
        return f"log_{self.name}" if self.section == "log" else self.name

    @property
    def flag(self) -> str:
        return "--" + self.flat.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PREFORK_" + self.flat.upper()


def entries() -> Iterator[Entry]:
    """Every scalar key, in the order of this file."""
    for section, cls in SECTIONS.items():
        yield from entries_of(section, cls)


def common() -> Iterator[Entry]:
    """The keys of a model that a flag or a variable gives to every model."""
    return (entry for entry in entries_of("models", ModelConfig) if entry.name not in ("name", "path", "warmup"))


def entries_of(section: str, cls: type[Section] | type[ModelConfig]) -> Iterator[Entry]:
    """The keys of one section."""
    for item in fields(cls):
        default = AUTO if item.default is MISSING else item.default
        yield Entry(section, item.name, item.metadata["key"], default)
