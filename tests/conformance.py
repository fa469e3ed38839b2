"""The onnx backend test cases as a conformance suite: `python -m tests.conformance [--every N] [--part K/N]`.

Each case is judged twice. First plain onnxruntime on the original file: does it load, run and give the expected
outputs? Then, where it does, our way: prepared by the loader's code, opened by a Session, each data set sent through
both codecs; the outputs are compared with plain onnxruntime's, bit for bit, and with the expected ones. Cases run in
two forked workers, so that a crash in native code is one failure and not the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.backend_cases import Case, load_cases

__all__ = ["Case", "Verdict", "judge_all", "load_cases", "main"]

WORKERS = 2
CASE_SECONDS = 60.0
PLAIN_KINDS = ("pass", "does not load", "fails to run", "differs", "crash")
PLAIN_PASSED = "plain passed"
OUR_KINDS = ("identical", "within tolerance", "differs", "not prepared", "refused", "crash")


@dataclass(frozen=True)
class Verdict:
    """`plain`: one of PLAIN_KINDS. `ours`: one of OUR_KINDS, empty when plain onnxruntime did not pass."""

    name: str
    plain: str
    ours: str = ""
    why: str = ""

    @property
    def passed(self) -> bool:
        return self.ours in ("identical", "within tolerance")


class _Worker:
    """A forked process that judges the cases whose numbers it is sent. The parent's side."""

    def __init__(self, cases: Sequence[Case], folder: Path, in_memory: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, cases, folder, in_memory), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Case | None = None
        self.passed = False
        self._cases = cases

    def send(self, index: int | None) -> None:
        self.case = None if index is None else self._cases[index]
        self.passed = False
        self.pipe.send(index)

    def end(self) -> Verdict | None:
        """Kill what is left of it; the verdict of the case that it was at, if any."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        if self.case is None:
            return None
        why = f"the process ended with {self.process.exitcode}"
        return Verdict(self.case.name, *(("pass", "crash") if self.passed else ("crash", "")), why)


def _work(pipe: Connection, cases: Sequence[Case], folder: Path, in_memory: bool) -> None:
    from tests.judging import judge_ours, judge_plain  # imports onnxruntime, so only after the fork

    while (index := pipe.recv()) is not None:
        case = cases[index]
        plain, why, session = judge_plain(case)
        if session is None:
            pipe.send(Verdict(case.name, plain, "", why))
            continue
        pipe.send(PLAIN_PASSED)  # so that the parent knows whose crash comes after it
        pipe.send(Verdict(case.name, plain, *judge_ours(case, session, folder, in_memory=in_memory)))


def judge_all(cases: Sequence[Case], *, in_memory: bool = False) -> Iterator[Verdict]:
    """Every case's verdict, as they come. A worker that dies or takes CASE_SECONDS counts as a crash of its case.
    `in_memory`: the weights are given as memory, not as a file."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        yield from _judge_all(cases, Path(folder), in_memory)


def _judge_all(cases: Sequence[Case], folder: Path, in_memory: bool) -> Iterator[Verdict]:
    todo = iter(range(len(cases)))
    workers: dict[Connection, _Worker] = {}

    def begin() -> None:
        worker = _Worker(cases, folder, in_memory)
        workers[worker.pipe] = worker
        worker.send(next(todo, None))

    try:
        for _ in range(WORKERS):
            begin()
        while workers:
            ready = wait(list(workers), CASE_SECONDS) or list(workers)
            for worker in [workers[pipe] for pipe in ready if isinstance(pipe, Connection)]:
                if isinstance(said := _hear(worker), str):
                    worker.passed = True
                elif said is not None:
                    yield said
                    worker.send(next(todo, None))
                else:
                    del workers[worker.pipe]
                    if (lost := worker.end()) is not None:
                        yield lost
                        begin()
    finally:
        for worker in workers.values():
            worker.end()


def _hear(worker: _Worker) -> Verdict | str | None:
    """A verdict, PLAIN_PASSED, or None when the worker has ended or is stuck."""
    try:
        said = worker.pipe.recv() if worker.pipe.poll() else None
    except (EOFError, OSError):
        return None
    return said if isinstance(said, Verdict | str) else None


def summary(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> list[str]:
    """Counts of both judgements, and of ours for each element type."""
    plain = Counter(v.plain for v in verdicts)
    ours = Counter(v.ours for v in verdicts if v.ours)
    lines = [f"cases: {len(verdicts)}", "plain onnxruntime: " + _counts(plain, PLAIN_KINDS)]
    lines += [
        f"through prefork:   {_counts(ours, OUR_KINDS)} (of {plain['pass']})",
        "",
        "element type   cases  pass  fail",
    ]
    by_name = {v.name: v for v in verdicts}
    table: dict[str, list[int]] = {}
    for case in cases:
        verdict = by_name[case.name]
        for dtype in case.dtypes if verdict.ours else ():
            row = table.setdefault(dtype, [0, 0])
            row[not verdict.passed] += 1
    lines += [f"{dtype:15}{sum(row):5}{row[0]:6}{row[1]:6}" for dtype, row in sorted(table.items())]
    return lines


def _counts(counter: Counter[str], kinds: Sequence[str]) -> str:
    return ", ".join(f"{counter[kind]} {kind}" for kind in kinds if counter[kind])


def _part(text: str) -> tuple[int, int]:
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return int(k), int(n)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case that plain onnxruntime passes also passes our way."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="each N-th case only, and three of each element type")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="part K of N")
    parser.add_argument("--list-failures", action="store_true", help="name what does not pass our way, with the reason")
    parser.add_argument("--list-plain", action="store_true", help="name what plain onnxruntime does not pass, too")
    parser.add_argument(
        "--in-memory", action="store_true", help="open over memory without a path, as SysV segments are"
    )
    args = parser.parse_args(argv)
    os.environ.update(ORT_DISABLE_TELEMETRY="1", OPENBLAS_NUM_THREADS="1")
    cases = load_cases(args.every, args.part)
    verdicts = list(judge_all(cases, in_memory=args.in_memory))
    print("\n".join(summary(cases, verdicts)))
    for verdict in sorted(verdicts, key=lambda v: v.name):
        if (args.list_plain and not verdict.ours) or (args.list_failures and verdict.ours and not verdict.passed):
            print(f"{verdict.name}: {verdict.ours or 'plain ' + verdict.plain}: {verdict.why}")
    return int(any(v.ours and not v.passed for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
