"""What every bench needs: its flags and models, its time limit, medians, tables, and the JSON that it leaves.

A bench is `main(argv) -> exit code` around a Report: 0 only when the claim holds, the figure on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy
import onnxruntime

from bench import models
from prefork import cpus
from prefork.ctlview import table

FOLDER = "PREFORK_TEST_MODELS"
RESULTS = Path(__file__).parent / "results"
QUICK_SECONDS, FULL_SECONDS = 60, 1200  # after which a bench that hangs ends itself


class OutOfTime(Exception):
    """The bench took longer than it may, or was told to stop."""


def parser(doc: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", type=Path, default=default_folder(), metavar="DIR", help="folder of NAME.onnx")
    made.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes; default bench/results/NAME.json")
    made.add_argument("--quick", action="store_true", help="a smaller run that ends within 45 s")
    return made


def default_folder() -> Path:
    return Path(os.environ.get(FOLDER) or Path("~/.cache/prefork-models").expanduser())


def model(folder: Path, name: str) -> Path:
    """DIR/NAME.onnx, fetched when it is missing. Raises models.FetchError."""
    return models.fetch(folder, [name])[0]


@contextmanager
def place() -> Iterator[Path]:
    """A scratch directory with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield Path(folder)


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises OutOfTime in the main thread when the block takes longer, and on SIGTERM: both leave nothing behind."""

    def over(number: int, frame: object) -> NoReturn:
        raise OutOfTime(f"not done within {seconds} s" if number == signal.SIGALRM else "told to stop")

    before = {number: signal.signal(number, over) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Report:
    """What a bench found. `figure` is its last line; `data` goes into the JSON beside rows and machine."""

    name: str
    args: argparse.Namespace
    data: dict[str, Any] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    started: float = field(default_factory=time.time)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table, and keep it for the JSON."""
        print(f"\n{title}\n{table(head, [[_cell(value) for value in row] for row in rows])}", flush=True)
        self.tables.append({"title": title, "head": list(head), "rows": [list(row) for row in rows]})

    def finish(self, holds: bool, figure: str) -> int:
        """Write the JSON, print the figure; the exit code."""
        path: Path = self.args.out or RESULTS / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "bench": self.name, "quick": self.args.quick, "holds": holds, "figure": figure,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds": round(time.time() - self.started, 1), "machine": machine(), "load_before": self.load_before,
            "tables": self.tables, **self.data,
        }  # fmt: skip
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"\n{path}\n{'holds' if holds else 'DOES NOT HOLD'}: {figure}", flush=True)
        return 0 if holds else 1


def _cell(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cpu": names[0] if names else platform.machine(), "cpus": cpus.allowed().count,
        "memory_mb": int(memory) // 1024,
        "kernel": platform.release(), "python": platform.python_version(), "onnxruntime": onnxruntime.__version__,
        "numpy": numpy.__version__,
    }  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"q1": low, "median": middle, "q3": high}


def run(main: Any, argv: Sequence[str], most: int = FULL_SECONDS) -> NoReturn:
    """Call a bench's main under its time limit, and leave with its code."""
    seconds = QUICK_SECONDS if "--quick" in argv else most
    try:
        with limit(seconds):
            code = main(argv)
    except (models.FetchError, OutOfTime) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 69  # EX_UNAVAILABLE, sysexits.h
    sys.exit(code)
