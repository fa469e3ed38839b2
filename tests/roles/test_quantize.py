"""The search under a real server: the report tells what it chose and why, and the answers hold the budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from prefork.client import Client
from prefork.demo import evaluation, model_path
from prefork.tensor import Array
from tests.model import trap
from tests.plain_ort import Plain
from tests.roles.server import REPOSITORY, Server

BUDGET = 0.005


def digits(place: Path) -> tuple[Path, Path]:
    images, labels = evaluation()
    np.savez(place / "eval.npz", image=images.astype(np.float32), labels=labels)
    return model_path(), place / "eval.npz"


def report(server: Server, *flags: str) -> str:
    command = [sys.executable, "-m", "prefork.ctl", "--control", str(server.runtime / "control.sock"), "report", "m"]
    return subprocess.run([*command, *flags], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def decided(answer: Any) -> Array:
    found: Array = np.argmax(answer["scores"], axis=1)
    return found


def search(place: Path, model: Path, data: Path, *flags: str) -> Server:
    return Server(
        place, "--workers", "1", "--model", f"m={model}", "--quantize", "auto", "--quantize-seconds", "10",
        "--eval", str(data), "--accuracy-budget", str(BUDGET), *flags,
    )  # fmt: skip


def test_what_is_served_is_reported_and_holds_the_budget(place: Path) -> None:
    model, data = trap.write(place)
    with np.load(data) as file:
        inputs = {name: file[name] for name in file.files}
    labels = inputs.pop("labels")
    reference = np.mean(decided(Plain(model.read_bytes()).run(inputs)) == labels)
    with search(place, model, data, "--min-speedup", "0") as server:
        with Client(server.address, retries=0) as client:
            accuracy = np.mean(decided(client.infer("m", inputs)) == labels)
        told, text = json.loads(report(server, "--json")), report(server)
    gate = told["report"]["gate"]
    assert (told["quantize"], told["form"]) == ("auto", gate["choice"])
    assert (gate["budget"], gate["min_speedup"], gate["metric"]) == (BUDGET, 0.0, "top1")
    assert gate["evidence"].startswith(f"task accuracy on {len(labels)} labelled samples")
    assert gate["choice"] == "int8-mixed" or gate["stopped_early"]
    assert f"choice     {gate['choice']}: {gate['reason']}" in text
    assert accuracy >= reference * (1 - BUDGET) - 1e-9


def test_a_model_with_nothing_to_gain_is_served_as_it_is_and_says_so(place: Path) -> None:
    with search(place, *digits(place)) as server:
        told = json.loads(report(server, "--json"))
    assert (told["quantize"], told["form"], told["report"]["gate"]["choice"]) == ("auto", "fp32", "fp32")
    assert "no operator that would gain" in told["report"]["gate"]["reason"]


def test_what_does_not_fit_the_model_ends_the_start(place: Path) -> None:
    model, _ = trap.write(place)
    np.savez(place / "other.npz", picture=np.zeros((4, 64), np.float32))
    server = search(place, model, place / "other.npz")
    assert server.run_to_end() == 65
    assert "'picture' is none of the model's inputs: x" in server.said()
    assert not server.leftovers()
