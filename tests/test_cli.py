"""prefork-serve's command line as a shell sees it: help, refusals, and a flag for every key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import prefork
from prefork.cli import build_parser, configure, parse
from prefork.config import common, entries
from prefork.errors import ConfigError

ROOT = Path(__file__).parents[1]


def run(*args: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFORK_")} | (environ or {})
    return subprocess.run(
        [sys.executable, "-m", "prefork", *args], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def test_version_and_help() -> None:
    assert run("--version").stdout == f"prefork-serve {prefork.__version__}\n"
    ran = run("--help")
    assert ran.returncode == 0
    for entry in (*entries(), *common()):
        assert f" {entry.flag} " in ran.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--wokers", "3"], "flag --wokers is unknown; did you mean --workers?"),
        (["--work", "3"], "flag --work is unknown"),
        (["--bind"], "argument --bind: expected one argument"),
        (["--workers", "-1"], "server.workers (--workers): expected an integer from 0 to 1024, found '-1'"),
        (["none.onnx"], "cannot be read: No such file or directory"),
        (["--config", "none.toml"], "none.toml cannot be read: No such file or directory"),
        (["--model", "a b=x.onnx"], "models.name (command line): expected a name of 1 to 64"),
    ],
)
def test_refusals_are_one_line_and_exit_78(args: list[str], said: str) -> None:
    ran = run(*args)
    assert (ran.returncode, ran.stdout) == (78, "")
    assert ran.stderr.startswith("prefork-serve: error: ") and ran.stderr.count("\n") == 1
    assert said in ran.stderr


def test_every_key_has_a_flag_that_reaches_it(tmp_path: Path) -> None:
    texts = {
        "bind": ":1",
        "metrics_bind": ":2",
        "pin": "cores",
        "shm": "sysv",
        "template": "off",
        "keep_previous": "off",
        "run_in": "thread",
        "log_level": "error",
        "log_format": "json",
        "log_requests": "0.25",
    }
    argv, expected = [], {}
    for entry in entries():
        text = texts.get(entry.flat, str(tmp_path) if "PATH" in str(entry.key.kind.expected).upper() else "2048")
        if entry.flat in ("max_dims", "workers", "threads"):
            text = "7"
        argv += [f"{entry.flag}={text if entry.flat not in ('unix', 'control') else f'{tmp_path}/{entry.flat}'}"]
        expected[entry.path] = entry.flag
    config = configure(parse(argv), {})
    assert {name: source for name, source in config.sources.items() if not name.startswith("models.")} == expected
    assert (config.server.bind, config.server.shm, config.limits.max_dims) == (":1", "sysv", 7)


def test_models_of_the_command_line(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(b"\x08\x08")
    args = parse([str(tmp_path / "a.onnx"), "--model", f"x.1={tmp_path}/b.onnx", "--quantize", "int8"])
    config = configure(args, {"PREFORK_MODEL": "gone=gone.onnx"})
    assert [(m.name, m.path.name, m.quantize) for m in config.models] == [
        ("a", "a.onnx", "int8"),
        ("x.1", "b.onnx", "int8"),
    ]


def test_flags_of_the_search_reach_every_model(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx", "e.npz"):
        (tmp_path / name).write_bytes(b"\x08\x08")
    texts = {"quantize": "auto", "metric": "f1", "eval": f"{tmp_path}/e.npz", "calibration": f"{tmp_path}/e.npz"}
    texts["handler"] = "owners:C"
    argv = [f"{entry.flag}={texts.get(entry.flat, '0.25')}" for entry in common()]
    config = configure(parse([f"{tmp_path}/a.onnx", f"{tmp_path}/b.onnx", *argv]), {})
    for model in config.models:
        for entry in common():
            assert config.sources[f"models.{model.name}.{entry.name}"] == entry.flag
        assert (model.quantize, model.metric, model.accuracy_budget) == ("auto", "f1", 0.25)


def test_flags_are_not_abbreviated() -> None:
    assert "--worker-timeout" in build_parser().flags()
    with pytest.raises(ConfigError, match="--worker is unknown; did you mean --workers"):
        parse(["--worker", "3"])


def test_check_prints_what_holds_without_starting(tmp_path: Path) -> None:
    ran = run("--check", "--workers", "3", "--runtime-dir", str(tmp_path / "run"), environ={"PREFORK_BACKLOG": "9"})
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = {" ".join(line.split()) for line in ran.stdout.splitlines()}
    assert {"workers = 3 # --workers", "backlog = 9 # PREFORK_BACKLOG", "max_dims = 32 # default"} <= lines
    assert not (tmp_path / "run").exists()


def test_check_names_a_model_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"this is no model")
    ran = run("--check", str(tmp_path / "bad.onnx"))
    assert ran.returncode == 65
    assert "bad" in ran.stderr and ran.stderr.count("\n") == 1
