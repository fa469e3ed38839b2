"""Under a real systemd: start, reload, watchdog, stop, warm cache, refusals, restarts with socket activation.

    debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,python3,libstdc++6 trixie TREE
    pip install --python-version 3.13 --only-binary :all: --target SITE numpy onnxruntime onnx ml-dtypes uvloop \\
        msgpack protobuf sysv-ipc posix-ipc orjson prometheus-client
    python -m bench.systemd_live TREE SITE

boots the tree with systemd-nspawn (as root; NSPAWN names the program when it is not installed) and uses the unit files
in conf/ as they are. Each row is one fact that systemd itself told.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import harness
from bench.systemd_box import Box, boot
from bench.verdict import Verdict

ADDRESS = "127.0.0.1:7070"
CONFIG = """[server]
bind = "127.0.0.1:7070"
workers = 2
worker_timeout = {worker_timeout}
[log]
format = "json"
[[models]]
name = "digits"
path = "{digits}"
"""
DIGITS = "/opt/prefork-serve/lib/prefork/demo/digits.onnx"
LARGE = """[[models]]
name = "large"
path = "/srv/models/large.onnx"
quantize = "int8"
"""
SLOW = """[[models]]
name = "slow"
path = "/srv/models/large.onnx"
quantize = "auto"
quantize_seconds = 20
"""
SYSV = 'shm = "sysv"\n[telemetry]\nmetrics_bind = "127.0.0.1:9090"\n[log]'
READYZ = "import urllib.request as u; r = u.urlopen('http://127.0.0.1:9090/readyz'); print(r.status, r.read().decode())"
SHORT = 8.0  # seconds that a start has by itself, for one that takes longer
DROP_IN = "/run/systemd/system/prefork.service.d/bench.conf"
CTL = ("/opt/prefork-serve/bin/prefork-ctl", "--runtime-dir", "/run/prefork-serve")


class Live:
    """The scenario; each case gives one row. `cycles`: reloads, and restarts, under load."""

    def __init__(self, box: Box, large: Path | None) -> None:
        self.box, self.large = box, large
        self.cycles = 5 if large else 2
        self.watchdog = 6.0 if large else 3.0  # seconds; the unit's own would make this bench long
        self.cold = 0.0
        self.configure()

    def configure(self, *, worker_timeout: float = 30.0, text: str = "") -> None:
        known = CONFIG.format(worker_timeout=worker_timeout, digits=DIGITS) + (LARGE if self.large else "")
        (self.box.etc / "prefork.toml").write_text(text or known)

    def drop_in(self, *lines: str, section: str = "Service") -> None:
        self.box.write(DROP_IN, "\n".join([f"[{section}]", *lines]) + "\n")
        self.box.systemctl("daemon-reload")

    def status(self) -> dict[str, Any]:
        found = self.box.run(*CTL, "--json", "status")
        return dict(json.loads(found.stdout)) if found.returncode == 0 else {}

    def answers(self) -> bool:
        """One run of the model by the command, over the public socket."""
        image = str([[0, 0, 5, 13, 9, 1, 0, 0] * 8])
        found = self.box.run(*CTL, "infer", "digits", "--input", f"image={image}", "--output", "label")
        return found.returncode == 0 and found.stdout.startswith("label:")

    def log(self) -> list[dict[str, Any]]:
        """The events of the unit's present invocation."""
        invocation = self.box.show("InvocationID")["InvocationID"]
        lines = self.box.run("journalctl", "--output=cat", f"_SYSTEMD_INVOCATION_ID={invocation}").stdout.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def segments(self) -> list[str]:
        return sorted(path.name for path in (self.box.root / "dev/shm").iterdir())

    def begin(self) -> float:
        """systemctl start, which returns after READY=1; the seconds."""
        before = time.monotonic()
        code = self.box.systemctl("start", "prefork.service")
        assert code == 0, self.box.run("journalctl", "-u", "prefork.service", "-n", "20").stdout
        return time.monotonic() - before

    # cases

    def verified(self) -> Verdict:
        said = self.box.run("systemd-analyze", "verify", "prefork.service", "prefork.socket")
        noise = said.stdout + said.stderr
        return Verdict("systemd-analyze verify", "no word", noise.strip() or "no word", not noise.strip())

    def hardened(self) -> Verdict:
        said = self.box.run("systemd-analyze", "security", "--no-pager", "prefork.service").stdout
        found = re.search(r"exposure level for prefork.service: ([\d.]+)", said)
        score = float(found[1]) if found else 10.0
        return Verdict("systemd-analyze security", "at most 2.0", f"{score}", score <= 2.0)

    def started(self) -> Verdict:
        self.cold = self.begin()
        told, status = self.box.show("MainPID", "StatusText", "ActiveState"), self.status()
        uid = (self.box.root / f"proc/{told['MainPID']}").stat().st_uid
        found = f"{told['ActiveState']} after {self.cold:.2f} s, uid {uid}, {told['StatusText']!r}"
        holds = status.get("pid") == int(told["MainPID"]) and uid > 60000 and self.answers()
        return Verdict("start, empty cache", "active, MAINPID right, a dynamic user, answers", found, holds)

    def described(self) -> Verdict:
        with self.load() as found:
            text = self.box.until(self._rate, "a rate in the status line")
        return Verdict("status line", "models, workers, requests/s", text, bool(found) and "2 of 2 workers" in text)

    def _rate(self) -> str:
        text = self.box.show("StatusText")["StatusText"]
        found = re.search(r"([\d.]+) requests/s", text)
        return text if found and float(found[1]) > 0 else ""

    def reloaded(self) -> Verdict:
        before = self.box.show("MainPID", "InvocationID")
        with self.load() as found:
            begun = time.monotonic()
            code = sum(self.box.systemctl("reload", "prefork.service") for _ in range(self.cycles))
            seconds = (time.monotonic() - begun) / self.cycles
        after = self.box.show("MainPID", "InvocationID", "ReloadResult", "ActiveState")
        same = before.items() <= after.items() and after["ActiveState"] == "active"
        bad = failures(found)
        text = f"{after['ReloadResult']} after {seconds:.2f} s each, {told(found)}"
        holds = not code and same and not bad
        return Verdict(f"{self.cycles} reloads under load", "READY again, same master, nothing lost", text, holds, bad)

    def worker_killed(self) -> Verdict:
        victim = self.status()["workers"][0]["pid"]
        self.box.run("kill", "-KILL", str(victim))
        self.box.until(lambda: self.status().get("restarts") == 1 and self.answers(), "another worker")
        after = self.box.show("ActiveState", "NRestarts", "Result")
        found = ", ".join(f"{key} {value}" for key, value in after.items())
        return Verdict("kill -9 of a worker", "the unit stays", found, after["NRestarts"] == "0" and self.answers())

    def scaled(self) -> Verdict:
        """A worker that leaves takes nothing along; Python 3.13's event loop would unlink the Unix socket."""
        self.box.run(*CTL, "scale", "1")
        self.box.until(lambda: self.states() == ["ready", "retired"], "one worker")
        there = self.answers() and (self.box.root / "run/prefork-serve/prefork.sock").is_socket()
        self.box.run(*CTL, "scale", "2")
        self.box.until(lambda: self.states() == ["ready", "ready"], "two workers")
        found = "it stays, and answers" if there else "gone"
        return Verdict("one worker fewer, one more", "the Unix socket stays", found, there)

    def states(self) -> list[str]:
        return [row["state"] for row in self.status().get("workers", [])]

    def frozen(self) -> Verdict:
        return self._unwatched("watchdog: master stopped by SIGSTOP", lambda: [self.status()["pid"]])

    def hanging(self) -> Verdict:
        def workers() -> list[int]:
            return [row["pid"] for row in self.status()["workers"]]

        return self._unwatched("watchdog: every worker hangs", workers)

    def _unwatched(self, case: str, victims: Callable[[], list[int]]) -> Verdict:
        self.configure(worker_timeout=0.0)  # else the master would put things right itself
        self.drop_in(f"WatchdogSec={self.watchdog}")
        self.box.systemctl("restart", "prefork.service")
        first = self.box.show("InvocationID", "NRestarts")
        healthy = time.monotonic()
        self.box.until(lambda: time.monotonic() - healthy > 1.5 * self.watchdog, "a healthy life")
        lived = self.box.show("InvocationID", "NRestarts") == first
        self.box.run("kill", "-STOP", *map(str, victims()))
        begun = time.monotonic()
        self.box.until(lambda: self.box.show("NRestarts")["NRestarts"] == "1", "a restart")
        seconds = time.monotonic() - begun
        self.box.until(lambda: self.box.show("ActiveState")["ActiveState"] == "active" and self.answers(), "answers")
        before = first["InvocationID"]
        matches = (f"INVOCATION_ID={before}", "+", f"_SYSTEMD_INVOCATION_ID={before}")  # systemd's words, and its own
        journal = self.box.run("journalctl", "--output=cat", *matches).stdout
        said = "Failed with result 'watchdog'" in journal and "Fatal Python error: Aborted" in journal
        holds = lived and said and seconds < 2 * self.watchdog + 5
        found = f"fed for {1.5 * self.watchdog:g} s, then result watchdog and restarted after {seconds:.1f} s, answers"
        self.configure()
        self.drop_in()
        return Verdict(
            case, f"restarted within {self.watchdog:g} s and some", found if holds else journal[-500:], holds
        )

    def crashed(self) -> Verdict:
        self.box.systemctl("restart", "prefork.service")
        self.box.run("kill", "-KILL", self.box.show("MainPID")["MainPID"])
        self.box.until(lambda: self.box.show("NRestarts")["NRestarts"] == "1" and self.answers(), "a restart")
        left = self.segments()
        holds = len(left) == (2 if self.large else 1)
        return Verdict("kill -9 of the master", "restarted, one segment a model", f"segments {len(left)}", holds, left)

    def stopped(self) -> Verdict:
        begun = time.monotonic()
        code = self.box.systemctl("stop", "prefork.service")
        seconds = time.monotonic() - begun
        after = self.box.show("Result", "ExecMainStatus", "ActiveState")
        left = [*self.segments(), *(["run"] if (self.box.root / "run/prefork-serve").exists() else [])]
        found = f"{after['Result']}, status {after['ExecMainStatus']} after {seconds:.2f} s, left {left or 'nothing'}"
        holds = not code and after["Result"] == "success" and after["ExecMainStatus"] == "0" and not left
        return Verdict("stop", "success, exit code 0, nothing left", found, holds)

    def warm(self) -> Verdict:
        seconds = self.begin()
        origins = [line["origin"] for line in self.log() if line["event"] == "segment published"]
        found = f"origins {', '.join(origins)}; {seconds:.2f} s, cold {self.cold:.2f} s"
        return Verdict("start, warm cache", "every model from the cache", found, set(origins) == {"cache"})

    def other_memory(self) -> Verdict:
        """System V segments in the service's own IPC namespace, and the metrics process beside."""
        self.box.systemctl("stop", "prefork.service")
        known = CONFIG.format(worker_timeout=30.0, digits=DIGITS).replace("[log]", SYSV)
        self.configure(text=known)
        self.begin()
        kinds = [row["segment"]["kind"] for row in self.status()["models"]]
        ready = self.box.until(self._readyz, "an answer of /readyz")
        holds = kinds == ["sysv"] and self.answers() and ready.startswith("200") and not self.segments()
        self.configure()
        return Verdict("System V segments, metrics", "answers, /readyz 200", f"{kinds}, /readyz {ready}", holds)

    def _readyz(self) -> str:
        return self.box.run("python3", "-c", READYZ).stdout.strip()

    def patient(self) -> Verdict:
        """A quantization search that takes longer than the unit's time to start, which the server asks for."""
        self.box.systemctl("stop", "prefork.service")
        self.configure(text=CONFIG.format(worker_timeout=30.0, digits=DIGITS) + SLOW)
        self.drop_in(f"TimeoutStartSec={SHORT:g}")
        try:
            seconds = self.begin()
        finally:
            self.configure()
            self.drop_in()
        said = self.box.run("journalctl", "-u", "prefork.service", "--output=cat").stdout
        holds = seconds > SHORT and "start operation timed out" not in said
        found = f"active after {seconds:.1f} s"
        return Verdict("a start that gets on for long", f"active, after more than {SHORT:g} s", found, holds)

    def refused(self, case: str, text: str, code: int) -> Verdict:
        self.box.systemctl("stop", "prefork.service")
        self.configure(text=text)
        self.box.systemctl("start", "prefork.service")
        after = self.box.show("Result", "ExecMainStatus", "NRestarts", "ActiveState")
        self.configure()
        self.box.systemctl("reset-failed", "prefork.service")
        found = f"{after['ActiveState']}, status {after['ExecMainStatus']}, restarts {after['NRestarts']}"
        holds = found == f"failed, status {code}, restarts 0"
        return Verdict(case, f"failed with {code}, not tried again", found, holds)

    def activated(self, lines: int) -> Verdict:
        """The first connection starts the service; then restarts under load."""
        self.box.systemctl("stop", "prefork.service")
        more = ["ListenStream=" + ADDRESS] * (lines - 1)
        self.box.write("/run/systemd/system/prefork.socket.d/bench.conf", "\n".join(["[Socket]", *more]) + "\n")
        self.box.systemctl("daemon-reload")
        assert self.box.systemctl("start", "prefork.socket") == 0
        with self.load() as found:
            self.box.until(lambda: self.box.show("ActiveState")["ActiveState"] == "active", "the service")
            for _ in range(self.cycles):
                assert self.box.systemctl("restart", "prefork.service") == 0
        where = [line["slots"] for line in self.log() if line["event"] == "sockets of the service manager"]
        kept = (self.box.root / "run/prefork-serve.sock").is_socket()
        self.box.systemctl("stop", "prefork.socket", "prefork.service")
        bad = failures(found)
        text = f"{', '.join(where)}; {told(found)}"
        case = f"socket activation, {lines} line{'s'[: lines > 1]}: {self.cycles} restarts under load"
        holds = not bad and kept and bool(where)
        return Verdict(case, "no connection refused or reset, no call failed", text, holds, bad)

    @contextmanager
    def load(self) -> Iterator[dict[str, Any]]:
        """Clients in the machine's network; what they found is in the dictionary afterwards."""
        found: dict[str, Any] = {}
        network = ["nsenter", "--target", str(self.box.leader), "-n"]
        command = [*network, sys.executable, "-m", "bench.systemd_load", ADDRESS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout is not None
            clients.stdout.readline()  # they have begun
            try:
                yield found
            finally:
                found.update(json.loads(clients.communicate()[0]))


def failures(found: dict[str, Any]) -> list[str]:
    good = ("ready", "draining")
    bad = [f"{count} connections {how}" for how, count in found["connections"].items() if how not in good]
    return bad + [f"{count} calls {how}" for how, count in found["calls"].items() if how != "ok"]


def told(found: dict[str, Any]) -> str:
    calls, ends = found["calls"], found["connections"]
    told_so = f", {ends['draining']} told to go" if ends.get("draining") else ""
    return f"{sum(ends.values())} connections{told_so}, {calls.get('ok', 0)} calls"


def cases(live: Live) -> Iterator[Callable[[], Verdict]]:
    yield from (live.verified, live.hardened, live.started, live.described, live.reloaded, live.worker_killed)
    yield from (live.scaled, live.stopped, live.warm, live.frozen, live.hanging, live.crashed)
    yield live.other_memory
    if live.large:
        yield live.patient
    yield lambda: live.refused("a key that is wrong", "[server]\nworkers = -1\n", 78)
    yield lambda: live.refused("a model that is none", '[[models]]\nname = "x"\npath = "prefork.toml"\n', 65)
    yield lambda: live.activated(1)
    yield lambda: live.activated(2)


def attempt(case: Callable[[], Verdict]) -> Verdict:
    """One row; a case that comes to no end is a row that does not hold."""
    try:
        row = case()
    except (AssertionError, KeyError, OSError, subprocess.SubprocessError) as e:
        row = Verdict(getattr(case, "__name__", "case"), "an end", f"{type(e).__name__}: {e}", False)
    print(f"{'holds' if row.holds else 'FAILS'}  {row.case}: {row.found}", flush=True)
    return row


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("tree", type=Path, help="a Debian tree with systemd 253 or later and Python")
    parser.add_argument("site", type=Path, help="folder of the packages for the tree's Python")
    args = parser.parse_args(argv)
    report = harness.Report("systemd_live", args)
    with harness.place() as place:
        large = None if args.quick else harness.model(args.models, "minilm")
        for folder in ("models", "etc"):
            (place / folder).mkdir()
        if large is not None:
            shutil.copy(large, place / "models/large.onnx")
        with boot(args.tree, args.site, place) as box:
            state, version = box.boot(), box.run("systemctl", "--version").stdout.splitlines()[0]
            print(f"{version}: {state}", flush=True)
            report.data["systemd"] = version
            rows = [attempt(case) for case in cases(Live(box, large))]
    report.table("under systemd", ("case", "expected", "found", "holds"),
                 [(row.case, row.expected, row.found, row.holds) for row in rows])  # fmt: skip
    for row in rows:
        if not row.holds:
            print(f"{row.case}: {row.details}")
    holds = all(row.holds for row in rows)
    return report.finish(holds, f"{sum(row.holds for row in rows)} of {len(rows)} cases hold under {version}")


if __name__ == "__main__":
    harness.run(main, sys.argv[1:])
