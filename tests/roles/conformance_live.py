"""The backend cases through running servers: `python -m tests.roles.conformance_live [--every N]`.

Cases that plain onnxruntime passes are served in batches, one model each, and asked over the socket with both codecs;
the answers are compared with plain onnxruntime's, bit for bit, then with the expected ones within the case's tolerance.
Two servers at a time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.update(ORT_DISABLE_TELEMETRY="1", OPENBLAS_NUM_THREADS="1")  # before numpy, when this is the program

from prefork.client import Client
from prefork.client.calls import CodecName
from prefork.errors import PreforkError
from prefork.value import Value
from tests.backend_cases import Case, load_cases
from tests.conformance import Verdict
from tests.judging import judge_plain
from tests.plain_ort import close, same_bits
from tests.roles.server import Server

CODECS: tuple[CodecName, ...] = ("msgpack", "protobuf")
BATCH = 50
LIMIT = 4 << 20  # bytes of a model; larger ones cost time and show nothing more


class Refused(AssertionError):
    """A server of the batch did not start."""


def judge(cases: Sequence[Case]) -> list[Verdict]:
    """The verdicts of all cases that plain onnxruntime passes, in batches."""
    batches = [cases[start : start + BATCH] for start in range(0, len(cases), BATCH)]
    with ThreadPoolExecutor(2) as pool:
        return [verdict for verdicts in pool.map(judge_batch, batches) for verdict in verdicts]


def judge_batch(cases: Sequence[Case]) -> list[Verdict]:
    """One server for all; when it does not start, the half that does not is looked for."""
    try:
        with tempfile.TemporaryDirectory(prefix="pf-") as folder, _serve(Path(folder), cases) as server:
            return list(_ask(server, cases))
    except AssertionError as e:
        if len(cases) == 1:
            return [Verdict(cases[0].name, "pass", "not prepared", str(e)[:300])]
        half = len(cases) // 2
        return judge_batch(cases[:half]) + judge_batch(cases[half:])


def _serve(folder: Path, cases: Sequence[Case]) -> Server:
    flags = [f"--model={_name(index)}={case.save(folder)}" for index, case in enumerate(cases)]
    return Server(folder, "--workers", "1", "--max-tensors", "4096", *flags)


def _name(index: int) -> str:
    return f"case-{index}"  # a case's own name may be longer than a model's


def _ask(server: Server, cases: Sequence[Case]) -> Iterator[Verdict]:
    clients = [Client(server.address, codec=codec, pool_size=1, retries=0) for codec in CODECS]
    for index, case in enumerate(cases):
        yield _judge_case(clients, _name(index), case)
    for client in clients:
        client.close()


def _judge_case(clients: Sequence[Client], name: str, case: Case) -> Verdict:
    plain, why, session = judge_plain(case)
    if session is None:
        return Verdict(case.name, plain, "", why)
    verdict = "identical"
    for inputs, wanted in case.datasets:
        reference = session.run(inputs)
        for codec, client in zip(CODECS, clients, strict=True):
            try:
                found: dict[str, Value] = client.infer(name, inputs)
            except PreforkError as e:
                return Verdict(case.name, plain, "refused", f"{codec}: {type(e).__name__}: {e}"[:300])
            if found.keys() == reference.keys() and all(same_bits(found[key], reference[key]) for key in reference):
                continue
            verdict = "within tolerance"
            for key, value in wanted.items():
                if key not in found or (why := close(found[key], value, case.rtol, case.atol)):
                    return Verdict(case.name, plain, "differs", f"{key} through {codec}: {why}")
    return Verdict(case.name, plain, verdict)


def runnable(cases: Sequence[Case]) -> tuple[list[Case], Counter[str]]:
    """The cases that plain onnxruntime passes, and the count of each other verdict."""
    chosen, others = [], Counter[str]()
    for case in cases:
        verdict = judge_plain(case)[0] if len(case.model) <= LIMIT else "too large"
        others[verdict] += 1
        if verdict == "pass":
            chosen.append(case)
    return chosen, others


def summary(cases: Sequence[Case], plain: Counter[str], verdicts: Sequence[Verdict]) -> list[str]:
    """The counts, the element types met, and each case that did not pass."""
    counts = Counter(verdict.ours for verdict in verdicts)
    passed = {verdict.name for verdict in verdicts if verdict.passed}
    types = sorted({dtype for case in cases if case.name in passed for dtype in case.dtypes})
    return [
        "plain onnxruntime: " + ", ".join(f"{count} {kind}" for kind, count in plain.most_common()),
        f"through the socket, both codecs: {len(passed)} of {len(verdicts)} pass ("
        + ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        + ")",
        f"element types: {len(types)}: {' '.join(types)}",
        *(f"{v.name}: {v.ours}: {v.why}" for v in verdicts if not v.passed),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case that plain onnxruntime passes also passes through a server."""
    text = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.roles.conformance_live", description=text)
    parser.add_argument("--every", type=int, default=1, help="each N-th case only, and three of each element type")
    args = parser.parse_args(argv)
    cases, plain = runnable(load_cases(args.every))
    verdicts = judge(cases)
    print("\n".join(summary(cases, plain, verdicts)))
    return int(not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
