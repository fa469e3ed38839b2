"""prefork-serve prepare and inspect, and prefork-ctl report: real loaders, real caches, and what a hit imports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import external_data_helper

from prefork import reportview
from prefork.cli import configure, main, parse
from prefork.demo import model_path
from prefork.errors import ConfigError
from tests.roles.server import REPOSITORY, Server


def run(*args: str, code: int = 0) -> str:
    """What the command prints. Its progress goes to stderr, which is shown when it ends otherwise."""
    command = [sys.executable, "-m", "prefork", *args, "--log-level", "warning"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    return ran.stdout if code == 0 else ran.stderr


def found(*args: str) -> dict[str, Any]:
    (row,) = json.loads(run(*args, "--json"))
    return dict(row)


def entries(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir() if path.name != "sources")


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    """Flags for a cache and a scratch folder of this test's own."""
    (tmp_path / "work").mkdir()
    return ["--cache-dir", str(tmp_path / "cache"), "--work-dir", str(tmp_path / "work")]


def test_commands_are_first_words() -> None:
    assert parse(["prepare", "m.onnx"]).command == "prepare"
    args = parse(["--workers", "1", "prepare"])
    assert (args.command, args.paths) == ("", ["prepare"])
    assert parse(["./inspect"]).paths == ["./inspect"]
    with pytest.raises(ConfigError, match="flag --json is unknown"):
        parse(["m.onnx", "--json"])
    with pytest.raises(ConfigError, match="flag --check is unknown"):
        parse(["prepare", "--check"])


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"CACHE_DIRECTORY": "/c/one:/c/two", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c/one"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/prefork-serve/prepared"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/prefork-serve/prepared"),
        ({"HOME": "/h"}, "/h/.cache/prefork-serve/prepared"),
        ({}, None),
        ({"PREFORK_CACHE_DIR": "", "HOME": "/h"}, None),
        ({"PREFORK_CACHE_DIR": "/d"}, "/d"),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], folder: str | None) -> None:
    found = configure(parse([]), environ).server.cache_dir
    assert found == (Path(folder) if folder else None)


def test_prepare_then_inspect(place: list[str], tmp_path: Path) -> None:
    made = found("prepare", *place)
    assert made["origin"] == "file" and made["form"] == "fp32" and made["report"]["ops_after"]
    kept = found("inspect", *place)
    assert kept["origin"] == "cache"
    assert kept == {**made, "origin": "cache", "prepare_s": kept["prepare_s"]}
    assert found("prepare", *place)["origin"] == "cache"
    assert entries(tmp_path / "cache") == [".model"]
    assert list((tmp_path / "work").iterdir()) == []


def test_text_for_people(place: list[str]) -> None:
    text = run("prepare", *place)
    assert text.startswith("digits  fp32  (asked for: auto)\n")
    assert str(model_path()) in text and "onnxruntime" in text and "optimised" in text
    assert "from the cache" in run("inspect", *place)


def test_inspect_fills_the_cache_but_needs_none(place: list[str], tmp_path: Path) -> None:
    assert found("inspect", *place)["origin"] == "file"
    assert entries(tmp_path / "cache") == [".model"]
    assert found("inspect", "--cache-dir", "", *place[2:])["origin"] == "file"


def test_prepare_without_a_cache_is_refused(place: list[str]) -> None:
    said = run("prepare", *place[2:], "--cache-dir", "", code=78)
    assert "server.cache_dir (--cache-dir): prepare needs a folder" in said


def test_prepare_fails_when_nothing_can_be_kept(place: list[str], tmp_path: Path) -> None:
    said = run("prepare", *place, "--cache-size", "1KiB", code=73)
    assert "model 'digits'" in said and "cache_size is 1024" in said
    assert list((tmp_path / "work").iterdir()) == []


def test_a_model_that_cannot_be_prepared(place: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    assert "bad.onnx" in run("prepare", str(tmp_path / "bad.onnx"), *place, code=65)
    assert entries(tmp_path / "cache") == []


def test_two_at_once_prepare_once(place: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefork", "prepare", "--json", "--log-level", "error", *place]
    both = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) for _ in range(2)]
    said = [json.loads(process.communicate()[0])[0] for process in both]
    assert sorted(row["origin"] for row in said) == ["cache", "file"]
    assert entries(tmp_path / "cache") == [".model"]


def test_a_stopped_command_leaves_nothing(place: list[str], tmp_path: Path) -> None:
    """Stopped while it waits for another process, which holds the lock of what it wants."""
    found("prepare", *place)
    (entry,) = (tmp_path / "cache").glob("*.model")
    lock = entry.with_suffix(".lock")
    entry.unlink()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        command = [sys.executable, "-m", "prefork", "prepare", *place]
        with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE) as waiting:
            assert waiting.stderr is not None and b"waiting for it" in waiting.stderr.readline()
            waiting.send_signal(signal.SIGTERM)
            assert waiting.wait() == 128 + signal.SIGTERM
            assert waiting.stderr.read() == b""  # its loader is gone too, for this is the end of file
        holder.kill()
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_strangers_entry_is_replaced(place: list[str], tmp_path: Path) -> None:
    found("prepare", *place)
    (entry,) = (tmp_path / "cache").glob("*.model")
    os.chown(entry, 65534, 65534)
    assert found("prepare", *place)["origin"] == "file"
    assert entry.stat().st_uid == 0 and found("prepare", *place)["origin"] == "cache"


HIT = """
import os, socket, sys
from pathlib import Path
from prefork import loader
from prefork.cli import configure, parse
from prefork.jobs import CachePlace, LoaderJob
from prefork.log import setup
from prefork.shm.owner import Owner
config = configure(parse(sys.argv[2:]), {})
work = Path(sys.argv[1])
cache = CachePlace.of(config.server)
job = LoaderJob(setup("error"), config.models[0], "posix", Owner.current(), 0, work, "inspect", cache)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
code = loader.main(theirs, job)
heavy = {"numpy", "onnx", "onnxruntime", "orjson", "google", "ml_dtypes"} & set(sys.modules)
print(code, sorted(heavy), ours.recv(65536).decode())
"""


def test_a_hit_imports_no_numeric_library(place: list[str], tmp_path: Path) -> None:
    found("prepare", *place)
    command = [sys.executable, "-c", HIT, str(tmp_path / "work"), *place]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert said.startswith("0 [] ") and '"origin": "cache"' in said


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """The demo model with its weights in a file beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = onnx.load(model_path())
    external_data_helper.convert_model_to_external_data(model, location="w.bin", size_threshold=64)
    onnx.save_model(model, folder / "digits.onnx")
    return folder / "digits.onnx"


def test_external_data_is_part_of_the_key(place: list[str], tmp_path: Path, external: Path) -> None:
    args = [str(external), *place]
    assert found("prepare", *args)["origin"] == "file"
    assert found("prepare", *args)["origin"] == "cache"
    shutil.rmtree(tmp_path / "cache" / "sources")  # what external data it has must be found out again
    assert found("prepare", *args)["origin"] == "cache"
    with (external.parent / "w.bin").open("ab") as file:
        file.write(b"\0")
    assert found("prepare", *args)["origin"] == "file"
    assert entries(tmp_path / "cache") == [".model", ".model"]
    (external.parent / "w.bin").unlink()
    assert "w.bin" in run("prepare", *args, code=65)


def test_report_of_a_running_server(tmp_path: Path) -> None:
    with Server(tmp_path, "--workers", "1") as server:
        ask = ["--control", str(server.runtime / "control.sock"), "report", "digits"]
        command = [sys.executable, "-m", "prefork.ctl", *ask]
        text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        assert text.startswith("digits  fp32  (asked for: none)\n") and ", in " in text
        plain = subprocess.run([*command, "--json"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        assert json.loads(plain)["inputs"][0]["name"] == "image"
        command[-1] = "nobody"
        ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert ran.returncode != 0 and "model 'nobody' is not served; expected one of 'digits'" in ran.stderr


def test_text_tolerates_what_it_does_not_know() -> None:
    assert reportview.text({}).startswith("?  ?")
    strange = {
        "report": {"rows": [{"a": 1, "b": None}, {"a": 2.5}], "x_y": [1, "z"], "many": dict.fromkeys("abcdefghij", 1)}
    }
    text = reportview.text(strange)
    assert "rows" in text and "x y: 1 z" in text and "and 2 more" in text


def test_main_prints_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", str(tmp_path / "nowhere.onnx")]) == 78
    assert capsys.readouterr().err.startswith("prefork-serve: error: models.nowhere.path")
    assert list(tmp_path.iterdir()) == []
