"""Claim: no fault costs more than it must, and none leaves anything behind.

(a) kill -9 of random workers under load: only requests that this worker had accepted fail, no connect does, a client
    with retry sees nothing; (b) kill -9 of the master: everyone goes, and the next start removes what is left; (c) TERM
under load: all accepted requests are answered; (d) starts that cannot be: a clear error and nothing left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench import faults_kill, faults_load, faults_stop, harness
from bench.verdict import Verdict

PARTS = ("kills", "masters", "terms", "starts")
SLOW = "ppocr4-rec"  # takes seconds to prepare
THREAD = "ppocr2-cls"  # a millisecond a run: too long for the loop


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; repeatable")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="default 200, with --quick 10")
    args = parser.parse_args(argv)
    report = harness.Report("faults", args)
    verdicts: list[Verdict] = []
    with harness.place() as place:
        for part in args.part or PARTS:
            where = place / part
            where.mkdir()
            verdicts += run(part, where, args.models, args.kills, report)
    report.table(
        "faults", ("CASE", "REFERENCE", "BASELINE", "OURS", "HOLDS"),
        [(v.case, v.expected, v.baseline, v.found, "yes" if v.holds else "NO") for v in verdicts],
    )  # fmt: skip
    for verdict in verdicts:
        if not verdict.holds:
            print(f"\n{verdict.case}: {len(verdict.details)} findings, the first:")
            print("\n".join(f"  {text[:1000]}" for text in verdict.details[:5]))
    held = sum(verdict.holds for verdict in verdicts)
    return report.finish(held == len(verdicts), f"{held} of {len(verdicts)} fault cases hold")


def run(part: str, place: Path, models: Path, kills: int, report: harness.Report) -> list[Verdict]:
    quick = report.args.quick
    match part:
        case "kills":
            found, report.data["kills"] = faults_kill.workers(place, kills or (10 if quick else 200))
            return found
        case "masters":
            return faults_stop.masters(place, 0 if quick else 3, harness.model(models, SLOW))
        case "terms":
            return [faults_stop.terms(place, 1 if quick else 20, harness.model(models, THREAD))]
    overwritten = faults_load.overwritten(place, harness.model(models, SLOW), quick=quick)
    return faults_load.starts(place, quick=quick) + overwritten


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])
