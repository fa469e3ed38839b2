"""Claim: whatever breaks during a reload, the old generation serves on, no request fails, or all is gone; never half.

A server with three workers answers a light load of clients that repeat nothing, while a reload meets a broken model, a
killed process, a full /dev/shm, a flood on the control socket or a second server. Afterwards nothing more is held
than before, and a good reload works. When the master is killed, every process goes, and the next start finds and leaves
nothing of the old one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench import harness, reload_faults_kill, reload_faults_model, reload_faults_reach
from bench.verdict import Verdict

Case = tuple[str, str, Callable[[Path], list[str]]]


def cases() -> list[Case]:
    """Name, what is expected, and the deed: a folder to the problems found."""
    model, kill, reach = reload_faults_model, reload_faults_kill, reload_faults_reach
    same = "refused with a reason, the old serves"
    found: list[Case] = [(f"new model: {name}", same, partial(model.broken, spoil, words))
                         for name, (spoil, words) in model.BROKEN.items()]  # fmt: skip
    found += [
        ("loader killed", same, kill.loader_killed),
        ("loader out of address space (RLIMIT_AS)", same, kill.loader_starved),
        ("/dev/shm full", same, model.no_room),
        ("coming template killed while opening", "one or the other serves", partial(kill.template_killed, "opening")),
        ("coming template killed while rolling", "one or the other serves", partial(kill.template_killed, "rolling")),
        ("serving template killed, then a reload", "the new one serves", kill.old_template_killed),
    ]
    found += [(f"master killed while {name}", "all gone", partial(kill.master_killed, name)) for name in kill.MOMENTS]
    found += [
        ("control socket flooded", "requests and reload go on", reach.flooded),
        ("second master, same runtime directory", "exit 78, the first serves", partial(reach.second, "runtime")),
        ("second master, same address", "exit 78, the first serves", partial(reach.second, "bind")),
    ]
    return found


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--case", default="", metavar="WORD", help="only those with WORD in their name")
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="times each; default 3, with --quick 1")
    args = parser.parse_args(argv)
    report = harness.Report("reload_faults", args)
    found = [case for case in cases() if args.case in case[0]]
    if args.quick and not args.case:
        found = found[::3]
    with harness.place() as place:
        times = args.repeat or (1 if args.quick else 3)
        verdicts = [run(place / str(number), case, times) for number, case in enumerate(found)]
    report.table(
        "faults during a reload", ("CASE", "EXPECTED", "SEEN", "HOLDS"),
        [(v.case, v.expected, v.found[:90], "yes" if v.holds else "NO") for v in verdicts],
    )  # fmt: skip
    for verdict in verdicts:
        for text in verdict.details[:4]:
            print(f"{verdict.case}: {' '.join(text.split())[:900]}")
    held = sum(verdict.holds for verdict in verdicts)
    return report.finish(held == len(verdicts), f"{held} of {len(verdicts)} faults during a reload leave nothing half")


def run(place: Path, case: Case, times: int) -> Verdict:
    name, expected, deed = case
    problems: list[str] = []
    for turn in range(times):
        try:
            problems += deed(place / str(turn))
        except AssertionError as error:
            problems.append(f"{type(error).__name__}: {error}")
        except Exception as error:  # the other cases still count
            problems.append(f"{type(error).__name__}: {error}")
    seen = problems[0] if problems else f"as expected, {times} times"
    print(f"{'ok' if not problems else 'NO':3} {name}", flush=True)
    return Verdict(name, expected, " ".join(seen.split()), not problems, problems)


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])
