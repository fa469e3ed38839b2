"""A handler under real servers: its batches calibrate and judge, its code is part of the key, its faults are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model import small, trap
from tests.roles.server import REPOSITORY, Server

DIGITS = """
import numpy as np

class Digits:
    def calibration(self):
        with np.load("digits.npz") as file:
            images, labels = file["x"], file["labels"]
        for start in range(0, len(images), 16):
            yield {"x": images[start : start + 16]%s}
"""
WITH, WITHOUT = DIGITS % ', "labels": labels[start : start + 16]', DIGITS % ""
METRIC = """
import numpy as np

def score(outputs, labels):
    return float(np.mean(outputs["scores"].argmax(1) == labels))
"""
# As the console script does it: the folder of the program comes first, not that where it was started.
PROGRAM = "import sys; from prefork.cli import main; sys.exit(main())"


def run(place: Path, *args: str, code: int = 0) -> str:
    """What the command prints, or says when it fails."""
    (place / "bin").mkdir(exist_ok=True)
    (place / "work").mkdir(exist_ok=True)
    (place / "bin" / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(place / "bin" / "program.py"), *args, "--work-dir", str(place / "work")]
    ran = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert list((place / "work").iterdir()) == []
    return ran.stdout if code == 0 else ran.stderr


def inspect(place: Path, *args: str) -> dict[str, Any]:
    flags = ["--quantize", "auto", "--min-speedup", "0", "--json", "--cache-dir", str(place / "cache")]
    (row,) = json.loads(run(place, "inspect", "trap.onnx", *flags, *args))
    return dict(row)


@pytest.fixture
def model(place: Path) -> Path:
    return trap.write(place)[0]


def test_its_batches_calibrate_and_half_of_them_judge(place: Path, model: Path) -> None:
    (place / "owners.py").write_text(WITH)
    gate = inspect(place, "--handler", "owners:Digits")["report"]["gate"]
    assert gate["evidence"].startswith("task accuracy on 896 labelled samples, the half that calibration did not see")
    assert gate["choice"] == "int8-mixed"
    (place / "owners.py").write_text(WITHOUT)
    gate = inspect(place, "--handler", "owners:Digits")["report"]["gate"]
    assert gate["evidence"].startswith("agreement with fp32 on 896 samples given, the half that calibration did not")
    gate = inspect(place, "--handler", "owners:Digits", "--eval", "digits.npz")["report"]["gate"]
    assert gate["evidence"].startswith("task accuracy on 1797 labelled samples") and "half" not in gate["evidence"]
    assert not list(place.rglob("*.pyc"))


IMAGES = """
import numpy as np

class Images:
    def calibration(self):
        generator = np.random.default_rng(0)
        for _ in range(8):
            yield {"x": generator.standard_normal((1, 3, 32, 32))}  # FP64, as numpy makes them
"""


def test_with_its_batches_convolutions_are_quantized(place: Path) -> None:
    small.save(small.convolution(), place / "trap.onnx")
    (place / "owners.py").write_text(IMAGES)
    without = inspect(place)["report"]["gate"]
    assert without["choice"] == "fp32" and not without["candidates"]
    gate = inspect(place, "--handler", "owners:Images")["report"]["gate"]
    tried = {one["name"]: one for one in gate["candidates"]}
    assert "static-minmax" in tried  # the first that needs ranges
    assert tried["static-minmax"]["delta"] <= 0.005 and gate["choice"] in tried


def test_its_source_is_part_of_the_key(place: Path, model: Path) -> None:
    (place / "owners.py").write_text(WITH)
    args = ("--handler", "owners:Digits")
    assert [inspect(place, *args)["origin"] for _ in range(2)] == ["file", "cache"]
    (place / "owners.py").write_text(WITH.replace("16]", "8 + 8]"))
    assert [inspect(place, *args)["origin"] for _ in range(2)] == ["file", "cache"]
    (place / "owners.py").write_text(WITH)
    assert inspect(place, *args)["origin"] == "cache"
    plain = (*args, "--quantize", "none")
    assert inspect(place, *plain)["origin"] == "file"
    (place / "owners.py").write_text(WITH + "# nothing asks it for batches")
    assert inspect(place, *plain)["origin"] == "cache"
    (place / "owners.py").unlink()
    said = run(place, "inspect", "trap.onnx", "--quantize", "auto", *args, code=65)
    assert f"expected a module 'owners' in the current directory ({place}) or on PYTHONPATH, found none" in said


def test_code_behind_a_dotted_metric_is_part_of_the_key(place: Path, model: Path) -> None:
    package = place / "judge" / "own"
    package.mkdir(parents=True)
    (place / "judge" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "metrics.py").write_text(METRIC)
    args = ("--metric", "judge.own.metrics:score", "--eval", "digits.npz")
    made = inspect(place, *args)
    assert (made["origin"], made["report"]["gate"]["metric"]) == ("file", "judge.own.metrics:score")
    assert inspect(place, *args)["origin"] == "cache"
    (package / "metrics.py").write_text(METRIC.replace("float(", "0.5 * float("))
    assert inspect(place, *args)["origin"] == "file"
    (place / "judge" / "__init__.py").write_text("THRESHOLD = 3\n")
    assert inspect(place, *args)["origin"] == "file"


def owners(body: str) -> str:
    return f"import itertools\nclass H:\n    def calibration(self):\n        {body}\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise LookupError('no texts')", "calibration(): LookupError: no texts ("),
        ("exit(3)", "calibration(): SystemExit: 3 ("),
        ("while True: pass", "calibration(): it took longer than 1 s"),
        ("yield {'y': 1}", "calibration(), batch 1: 'y' is none of the model's inputs: x, nor 'labels'"),
        ("yield {'x': [[1.0] * 63]}", "batch 1: input 'x': expected samples of shape [batch, 64], found [1, 63]"),
    ],
)
def test_faults_of_its_code_end_the_start_by_name(place: Path, model: Path, body: str, said: str) -> None:
    (place / "owners.py").write_text(owners(body))
    server = Server(
        place, "--workers", "1", "--model", f"m={model}", "--quantize", "auto", "--quantize-seconds", "1",
        "--handler", "owners:H", env={"PYTHONPATH": f"{place}:{REPOSITORY}"},
    )  # fmt: skip
    assert server.run_to_end() == 65
    error = (place / "stderr").read_text()
    assert error.startswith("prefork-serve: error: model 'm': ") and said in error, error
    assert "handler 'owners:H'" in error
    assert server.leftovers() == []


def test_a_generator_without_end_is_asked_for_so_much_only(place: Path, model: Path) -> None:
    (place / "owners.py").write_text(owners("yield from itertools.repeat({'x': [[0.5] * 64] * 8})"))
    gate = inspect(place, "--handler", "owners:H", "--quantize-seconds", "10")["report"]["gate"]
    assert "agreement with fp32 on 4096 samples given" in gate["evidence"]


def test_check_sees_a_handler_that_cannot_be_used(place: Path, model: Path) -> None:
    (place / "owners.py").write_text("class H: pass")
    said = run(place, "trap.onnx", "--check", "--handler", "owners:H", code=65)
    assert f"module 'owners' ({place}/owners.py): expected class 'H' to have calibration, found none of them" in said
    said = run(place, "trap.onnx", "--check", "--handler", "owners", code=78)
    assert "models.handler (--handler): expected module:Class, or \"\" for none, found 'owners'" in said
