"""prefork-ctl: its text, its reading of the shell's arguments, and its commands against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefork
from prefork import ctlchange, ctlview
from prefork.ctl import build_parser
from prefork.ctlchange import ChangeFailed
from prefork.ctlinfer import SMALL, show
from prefork.errors import DeadlineExceeded, InvalidArgument
from prefork.tensor import numpy_dtype
from tests.roles.server import REPOSITORY, Server


def test_table() -> None:
    rows = [("a", 1, ctlview.size(10)), ("long", None, ctlview.size(1536)), ("", 300, None)]
    assert ctlview.table(("NAME", "N", "SIZE"), rows).splitlines() == [
        "NAME    N     SIZE",
        "a       1     10 B",
        "long    -  1.5 KiB",
        "-     300        -",
    ]
    assert ctlview.table(("NAME", "N"), []) == "NAME  N"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (61, "1m01s"), (3599, "59m59s"), (7500, "2h05m"), (450000, "5d05h")]
)
def test_duration(seconds: float, text: str) -> None:
    assert ctlview.duration(seconds) == text


def test_status_of_a_stranger_is_shown_as_far_as_it_goes() -> None:
    assert ctlview.status({}).startswith("prefork-serve ?  pid ?  ?")
    text = ctlview.status(
        {"workers": [{"slot": 0, "reason": "killed by SIGKILL", "new": 1}], "models": [{"name": "m"}]}
    )
    assert "slot 0: killed by SIGKILL" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.array([1.5, np.nan, -np.inf]), {"dtype": "FP64", "shape": [3], "value": [1.5, "NaN", "-Infinity"]}),
        (np.array([[0.1, np.inf]], np.float32), {"dtype": "FP32", "shape": [1, 2], "value": [[0.1, "Infinity"]]}),
        (np.array(3, np.int64), {"dtype": "INT64", "shape": [], "value": 3}),
        (np.array(["a", "b"], object), {"dtype": "BYTES", "shape": [2], "value": ["a", "b"]}),
        (np.array([1 + 2j], np.complex64), {"dtype": "COMPLEX64", "shape": [1], "value": [[1.0, 2.0]]}),
        (np.ones(2, numpy_dtype("BF16")), {"dtype": "BF16", "shape": [2], "value": [1.0, 1.0]}),
        (np.full(2, 3, numpy_dtype("INT4")), {"dtype": "INT4", "shape": [2], "value": [3, 3]}),
        (np.ones(2, numpy_dtype("FLOAT8E5M2")), {"dtype": "FLOAT8E5M2", "shape": [2], "value": [1.0, 1.0]}),
        (np.empty((0, 2), bool), {"dtype": "BOOL", "shape": [0, 2], "value": []}),
        (np.arange(SMALL + 1), {"dtype": "INT64", "shape": [SMALL + 1], "min": 0.0, "max": 64.0, "mean": 32.0}),
        ([{"a": 0.5}, {"b": float("nan")}], {"value": [{"a": 0.5}, {"b": "NaN"}]}),
        ([np.array([1.0])], {"value": [[1.0]]}),
        (None, {"value": None}),
    ],
)
def test_values_are_shown_as_json_can_carry_them(value: Any, shown: dict[str, Any]) -> None:
    found = show(value, whole=False)
    assert json.loads(json.dumps(found, allow_nan=False)) == shown


def test_common_flags_stand_on_either_side() -> None:
    for argv in (["--json", "--control", "/c", "status"], ["status", "--json", "--control", "/c"]):
        args = build_parser().parse_args(argv)
        assert (args.json, args.control, args.config) == (True, "/c", None)


def test_shares() -> None:
    assert [ctlchange.share(text) for text in ("10%", "0.1", "100%", "1")] == [0.1, 0.1, 1.0, 1.0]
    for text in ("0", "0%", "101%", "1.5", "-5%", "nan", "ten", "", "%"):
        with pytest.raises(InvalidArgument, match="expected a share such as 10%"):
            ctlchange.share(text)


class Told:
    """A server that tells these rows, one a question."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = [{"number": 7, "kind": "reload", "reason": "", "hold_s": None, **row} for row in rows]
        self.asked: list[Any] = []

    def __call__(self, command: str, **values: Any) -> dict[str, Any]:
        self.asked.append((command, values))
        return self.rows.pop(0)


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("reload", [{"phase": "loading"}, {"phase": "rolling"}, {"phase": "done"}]),
        ("reload", [{"phase": "loading"}, {"phase": "holding"}]),
        ("reload", [{"phase": "holding", "hold_s": 60.0}, {"phase": "done", "hold_s": 60.0}]),
        ("promote", [{"phase": "rolling"}, {"phase": "done"}]),
        ("rollback", [{"phase": "returning", "reason": "rolled back"}, {"phase": "failed", "reason": "rolled back"}]),
    ],
)
def test_a_change_is_followed_to_its_end(command: str, rows: list[dict[str, Any]]) -> None:
    told = Told(*rows)
    assert ctlchange.follow(told, command, {}, 60.0, wait=True)["phase"] == rows[-1]["phase"] and told.rows == []
    assert told.asked[1:] == [("change", {"number": 7})] * (len(rows) - 1)


@pytest.mark.parametrize("command", ["reload", "restart", "promote", "rollback"])
def test_a_change_that_fails_is_an_error(command: str) -> None:
    told = Told({"phase": "opening"}, {"phase": "failed", "reason": "why it did"})
    with pytest.raises(ChangeFailed, match=f"{command} failed, .* served on: why it did") as caught:
        ctlchange.follow(told, command, {}, 60.0, wait=True)
    assert caught.value.exit_code == 1


def test_to_wait_has_an_end() -> None:
    with pytest.raises(DeadlineExceeded, match="reload is loading after 0 s; it goes on"):
        ctlchange.follow(Told({"phase": "loading"}), "reload", {}, 0.0, wait=True)
    assert ctlchange.follow(Told({"phase": "loading"}), "reload", {}, 0.0, wait=False)["phase"] == "loading"


def ctl(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefork.ctl", *args]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_no_server(tmp_path: Path) -> None:
    ran = ctl("--runtime-dir", str(tmp_path), "status")
    assert (ran.returncode, ran.stdout) == (70, "")
    assert ran.stderr.startswith(f"prefork-ctl: error: control socket {tmp_path}/control.sock: No such file")
    assert ctl("segments", "--json").returncode == 0
    assert ctl("stats").returncode == 78
    assert ctl("health", "--connect", f"unix:{tmp_path}/none").returncode == 70
    assert ctl("--version").stdout == f"prefork-ctl {prefork.__version__}\n"


def test_status_loads_no_numpy() -> None:
    code = "import sys, prefork.ctl; prefork.ctl.main(['segments']); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False, stdout=-3).returncode == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), "--workers", "2") as running:
        yield running


def ask(server: Server, *args: str) -> Any:
    ran = ctl("--runtime-dir", str(server.runtime), "--json", *args)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return json.loads(ran.stdout)


def test_status(server: Server) -> None:
    found = ask(server, "status")
    assert (found["pid"], found["state"], found["version"]) == (server.pid, "ready", prefork.__version__)
    assert [(row["slot"], row["state"]) for row in found["workers"]] == [(0, "ready"), (1, "ready")]
    text = ctl("--runtime-dir", str(server.runtime), "status").stdout
    for part in (str(found["workers"][1]["pid"]), found["bind"][0], found["models"][0]["segment"]["name"], "digits"):
        assert part in text


def test_segments(server: Server) -> None:
    ours = [row for row in ask(server, "segments") if row["owner_pid"] == server.pid]
    segment = server.status()["models"][0]["segment"]
    assert {"kind": ours[0]["kind"], "name": ours[0]["name"], "size": ours[0]["size"]} == segment
    assert (ours[0]["alive"], ours[0]["published"], ours[0]["mode"]) == (True, True, "0600")
    text = ctl("segments").stdout
    assert segment["name"] in text and str(server.pid) in text


def test_metadata_and_health(server: Server) -> None:
    found = ask(server, "metadata", "digits")
    assert (found["inputs"][0]["name"], found["inputs"][0]["shape"]) == ("image", [-1, 64])
    assert ask(server, "health") == {"live": True, "ready": True}
    assert "FP32" in ctl("--runtime-dir", str(server.runtime), "metadata", "digits").stdout


@pytest.mark.parametrize("codec", ["msgpack", "protobuf"])
def test_infer_from_file_and_json_agree(server: Server, tmp_path: Path, codec: str) -> None:
    image = np.arange(64, dtype=np.float32).reshape(1, 64) % 17
    np.save(tmp_path / "image.npy", image)
    common = ("infer", "digits", "--codec", codec)
    first = ask(server, *common, "--input", f"image=@{tmp_path}/image.npy", "--save", f"label=@{tmp_path}/y.npy")
    second = ask(
        server, *common, "--input", f"image={image.tolist()}", "--output", "label", "--connect", server.address
    )
    assert list(second) == ["label"]
    assert first["label"]["value"] == second["label"]["value"] == np.load(tmp_path / "y.npy").tolist()
    assert first["probabilities"]["shape"] == [1, 10]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--input", "image"], "--input 'image': expected NAME=VALUE"),
        (["--input", "image=[["], "--input image: neither @FILE.npy nor JSON"),
        (["--input", 'image=["a"]'], "--input image: JSON does not fit FP32: elements are str"),
        (["--input", "image=[[1, 2], [3]]"], "--input image: JSON does not fit FP32"),
        (["--input", "image=@none.npy"], "--input image: none.npy cannot be read as npy"),
        (["--input", "picture=[1]"], "picture"),
        (["--save", "label=y.npy"], "--save: expected NAME=@FILE.npy, found 'y.npy'"),
    ],
)
def test_bad_inputs_are_named(server: Server, args: list[str], said: str) -> None:
    ran = ctl("--runtime-dir", str(server.runtime), "infer", "digits", *args)
    assert ran.returncode == 70 and ran.stdout == ""
    assert said in ran.stderr and ran.stderr.count("\n") == 1


def test_an_unknown_model_is_named(server: Server) -> None:
    ran = ctl("--runtime-dir", str(server.runtime), "infer", "digit", "--input", "image=[1]")
    assert ran.returncode == 70
    assert "digit" in ran.stderr


def test_scale_and_stop(tmp_path: Path) -> None:
    with Server(tmp_path, "--workers", "1") as server:
        assert ask(server, "scale", "2") == {"workers": 2}
        assert len(ask(server, "status")["workers"]) >= 2
        ran = ctl("--runtime-dir", str(server.runtime), "scale", "0")
        assert ran.returncode == 70 and "must be an integer from 1 to" in ran.stderr
        ask(server, "stop")
        assert server.process is not None
        assert server.process.wait() == 0
