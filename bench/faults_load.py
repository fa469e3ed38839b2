"""A start that cannot be: full disk, full shared memory, broken models, an overwritten segment. Part of bench.faults.

Each must end with a clear word on standard error and its own exit code, and leave nothing. What needs a small file
system gets one in a mount namespace of its own, so nobody else sees it.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sysv_ipc
from onnx import TensorProto, helper

from bench import wire
from bench.faults_stop import wait_event
from bench.inputs import FEEDS
from bench.server import Server
from bench.verdict import Verdict
from prefork.demo import model_path
from prefork.shm import segment
from prefork.shm.segment import SegmentRef

DATAERR, IOERR, TEMPFAIL, CONFIG = 65, 74, 75, 78  # sysexits.h


class Confined(Server):
    """A server behind a shell line. With `full`, a folder, that line runs in a mount namespace of its own, where the
    folder is a tmpfs of `size`; what the server leaves there goes to the file `left`, since no one else can see it."""

    def __init__(self, place: Path, line: str = "", *, full: Path | None = None, size: str = "") -> None:
        super().__init__(place)
        self._line, self._full, self._size = line, full, size

    @property
    def command(self) -> list[str]:
        if self._full is None:
            return ["sh", "-c", f'{self._line}\nexec "$@"', "sh", *super().command]
        folder, left = shlex.quote(str(self._full)), shlex.quote(str(self.place / "left"))
        line = (
            f'mount -t tmpfs -o size={self._size} bench {folder} && "$@"\ncode=$?; ls -A {folder} >{left}; exit $code'
        )
        enter = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        return [*enter, "sh", "-c", line, "sh", *super().command]

    def leftovers(self) -> list[str]:
        left = self.place / "left"
        return super().leftovers() + (left.read_text().split() if left.exists() else [])


@dataclass(frozen=True, slots=True)
class Case:
    """`words`: each must stand in what the server says on standard error."""

    name: str
    make: Callable[[Path], Server]
    code: int
    words: tuple[str, ...]


def _full(folder: str, size: str, place: Path) -> Server:
    """`folder` may be relative to `place`."""
    return Confined(place, full=place / folder, size=size)


def _file_limit(blocks: int, place: Path) -> Server:
    """`blocks` of 512 bytes, as POSIX has it for sh."""
    return Confined(place, f"ulimit -f {blocks}")


def _broken(change: Callable[[bytes], bytes], place: Path) -> Server:
    path = place / "broken.onnx"
    path.write_bytes(change(model_path().read_bytes()))
    return Server(place, str(path))


def _unknown_operator(place: Path) -> Server:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Frobnicate", ["x"], ["y"], "node")], "g", [x], [y])
    path = place / "unknown.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return Server(place, str(path))


def _noise(data: bytes) -> bytes:
    return random.Random(0).randbytes(len(data))


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _zero_head(data: bytes) -> bytes:
    return bytes(512) + data[512:]


CASES = (
    Case("/dev/shm too small", partial(_full, "/dev/shm", "64k"), TEMPFAIL, ("no room", "/dev/shm")),
    Case("ulimit -f below the scoreboard", partial(_file_limit, 64), TEMPFAIL, ("scoreboard", "File too large")),
    Case("disk of the loader full", partial(_full, "work", "32k"), TEMPFAIL, ("no room", "work", "No space left")),
    Case("disk of the loader too small", partial(_full, "work", "72k"), TEMPFAIL, ("no room", "No space left")),
    Case("truncated model", partial(_broken, _half), DATAERR, ("broken.onnx", "truncated")),
    Case("empty model", partial(_broken, lambda data: b""), CONFIG, ("broken.onnx", "content")),
    Case("model overwritten with noise", partial(_broken, _noise), DATAERR, ("broken.onnx",)),
    Case("first 512 bytes of the model zeroed", partial(_broken, _zero_head), DATAERR, ("broken.onnx",)),
    Case("unknown operator", _unknown_operator, DATAERR, ("Frobnicate", "unknown")),
)  # fmt: skip


def starts(place: Path, *, quick: bool) -> list[Verdict]:
    """(d): each of CASES; when `quick` every other one."""
    cases = CASES[:: 2 if quick else 1]
    return [_start(case, place / f"case-{number}") for number, case in enumerate(cases)]


def _start(case: Case, place: Path) -> Verdict:
    place.mkdir()
    server = case.make(place)
    code = server.run_to_end()
    said = (place / "stderr").read_text()
    problems = [] if code == case.code else [f"exit {code}, expected {case.code}: {said.strip()}"]
    problems += [f"{word!r} is not in: {said.strip()}" for word in case.words if word not in said]
    problems += ["a traceback"] if "Traceback" in said else []
    problems += [f"left behind: {name}" for name in server.leftovers()]
    text = problems[0] if problems else f"exit {code}: {said.strip().removeprefix('prefork-serve: error: ')}"
    return Verdict(case.name, f"exit {case.code}, says why", " ".join(text.split())[:110], not problems, problems)


def overwritten(place: Path, slow: Path, *, quick: bool) -> list[Verdict]:
    """(d): a byte of the segment changed by someone else, before any worker attaches and before a successor does."""
    found = []
    for kind in ("posix",) if quick else ("posix", "sysv"):
        for name, check in (("before a successor attaches", _later), ("before the workers attach", _before))[
            : 2 - quick
        ]:
            where = place / f"{kind}-{check.__name__}"
            where.mkdir()
            problems = check(where, kind, slow)
            text = problems[0] if problems else "checksum error names it; nothing left"
            found.append(Verdict(f"segment overwritten {name}, {kind}", "refused", text[:110], not problems, problems))
    return found


def flip(ref: SegmentRef) -> None:
    """Change one byte of the manifest, which running workers have read long ago; twice is as if never."""
    with segment.attach(ref) as attached:
        offset = attached.header.section("manifest").offset + 2
    if ref.path is not None:
        with Path(ref.path).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        return
    memory = sysv_ipc.attach(int(ref.name))
    with memoryview(memory) as view:
        view[offset] ^= 1
    memory.detach()


def _before(place: Path, kind: str, slow: Path) -> list[str]:
    """The first segment is changed while the second model, which takes its time, is still being loaded."""
    server = Server(place, "--shm", kind, "--workers", "2", f"--model=first={model_path()}", f"--model=second={slow}")
    process = server.launch()
    wait_event(server, "segment published", model="first")
    flip(_first(server.status()))
    code = process.wait()
    said = (place / "stderr").read_text()
    problems = [] if code == IOERR else [f"exit {code}, expected {IOERR}: {said}"]
    problems += [] if "checksum" in said else [f"'checksum' is not in: {said}"]
    return problems + [f"left behind: {name}" for name in server.leftovers()]


def _first(status: dict[str, Any]) -> SegmentRef:
    return SegmentRef.from_dict(status["models"][0]["segment"])


def _later(place: Path, kind: str, slow: Path) -> list[str]:
    """The segment is changed while two workers serve and one is dead; then it is put right again."""
    data = wire.request("digits", FEEDS["digits"](model_path())[0])
    with Server(place, "--shm", kind, "--workers", "3") as server:
        before, _ = wire.exchange(server.address, data)
        ref = _first(server.status())
        os.kill(server.pid, signal.SIGSTOP)  # nobody is replaced until the byte is changed
        victim = _children(server.pid)[0]
        os.kill(victim, signal.SIGKILL)
        flip(ref)
        os.kill(server.pid, signal.SIGCONT)
        rows = server.wait_slots(_says_checksum)
        problems = [] if sum(row["state"] == "ready" for row in rows) == 2 else [f"not two workers left: {rows}"]
        for _ in range(20):  # some of these come to the empty slot's socket, whose guardian answers
            after, _ = wire.exchange(server.address, data)
            if [bytes(t.data) for t in after.outputs] != [bytes(t.data) for t in before.outputs]:
                problems.append("the others answer otherwise than before")
        flip(ref)
        server.wait_slots(_all_ready)
    return problems


def _children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _says_checksum(rows: list[dict[str, Any]]) -> bool:
    return any("checksum" in row["reason"] for row in rows)


def _all_ready(rows: list[dict[str, Any]]) -> bool:
    return all(row["state"] == "ready" for row in rows)
