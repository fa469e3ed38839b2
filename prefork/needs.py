"""What a configuration asks of the machine: memory, descriptors, tasks. Runs in the master and in what would be it.

Knows no limit (facts.py reads those, preflight.py compares). Figures of our own processes were measured: a worker with
the ONNX Runtime has 20 MB of libraries, 350 mappings, 21 descriptors, 400 MB of address space. Those named LEAST are
below every measurement, those named LIKELY above the usual: how large a model becomes only its loader can know.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefork import cpus
from prefork.config import Config, ModelConfig

MIB = 1 << 20
# A segment's size as a multiple of the model file's: raw and packed weights, whole or quantized to 8 bits (auto: 4).
# Half precision is made whole again by an optimiser on processors that do not compute in it.
LEAST_SHARE = {"none": 0.5, "int8": 0.2, "fp16": 0.2, "auto": 0.1}
LIKELY_SHARE = {"none": 2.0, "int8": 0.8, "fp16": 2.0, "auto": 2.0}
LEAST_MEMORY, LEAST_WORKER_MEMORY = 64 * MIB, 4 * MIB
LIKELY_MEMORY, LIKELY_WORKER_MEMORY = 192 * MIB, 15 * MIB
LOADER_COPIES = 3  # of the largest model file, which a loader may hold at once
LEAST_SPACE, LIKELY_SPACE = 256 * MIB, 1024 * MIB  # address space of a process with the ONNX Runtime
LEAST_DATA, LIKELY_DATA = 64 * MIB, 256 * MIB  # its writable private part
LEAST_COMMIT, LIKELY_COMMIT = 40 * MIB, 100 * MIB  # what each worker may write to, by a fork's arithmetic
LEAST_MAPS, LIKELY_MAPS, MODEL_MAPS = 400, 600, 1000  # libraries and heaps, and one region a tensor
# Descriptors. A worker: streams, log, channel, scoreboard, the loop's own; two for each socket that it listens on,
# which may become those of all slots; and spare ones for clients that are being refused. The master: streams, log,
# sockets and places; a slot has its listener and the channels of its worker, of a successor and of one that leaves, a
# model the segments of two generations.
WORKER_FILES, LISTENING_FILES, SPARE_FILES = 16, 2, 32
MASTER_FILES, SLOT_FILES, MODEL_FILES, CONTROL_FILES = 20, 4, 2, 16
LEAST_CONNECTIONS = 16
OWN_TASKS = 6  # master, template, loader, telemetry, and a fork's process in between, twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes: `least`, `likely`: all segments together, `largest`: the largest model file. Counts: `connections` is
    max_connections, `worker_files` the descriptors of a worker without them, `listening_files` those of them that are
    for listening and for segments, `master_files` the master's, `tasks` processes and threads of all."""

    models: int
    workers: int
    least: int
    likely: int
    largest: int
    connections: int
    listening_files: int
    tasks: int
    posix: bool

    @property
    def worker_files(self) -> int:
        return WORKER_FILES + self.listening_files + SPARE_FILES

    @property
    def master_files(self) -> int:
        return MASTER_FILES + SLOT_FILES * self.workers + MODEL_FILES * self.models + CONTROL_FILES

    @property
    def least_connections(self) -> int:
        """With fewer a server is of no use."""
        return min(self.connections, LEAST_CONNECTIONS)


def of(config: Config) -> Needs:
    """What this configuration asks for, here: without `workers` it depends on the CPUs that are allowed."""
    server, models = config.server, config.models
    workers = server.workers or cpus.allowed().count
    posix = server.shm == "posix"
    sizes = [(model.quantize, _size(model)) for model in models]
    # a worker's loop and its lane, and the further threads of each model's runs
    threads = 2 + (config.compute.threads - 1) * len(models)
    return Needs(
        models=len(models),
        workers=workers,
        least=int(sum(size * LEAST_SHARE[form] for form, size in sizes)),
        likely=int(sum(size * LIKELY_SHARE[form] for form, size in sizes)),
        largest=max((size for _, size in sizes), default=0),
        connections=config.limits.max_connections,
        listening_files=LISTENING_FILES * (workers + (server.unix is not None)) + len(models) * posix,
        tasks=OWN_TASKS + workers * threads,
        posix=posix,
    )


def _size(model: ModelConfig) -> int:
    """Bytes of the model file and of the external data that goes by its name. What is missing is the loader's to
    complain about."""
    total = 0
    for path in (model.path, *(Path(f"{model.path}{suffix}") for suffix in (".data", "_data"))):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
