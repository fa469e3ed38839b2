"""A fixed part of the conformance suite, and proof that it can fail. All of it: `python -m tests.conformance`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from prefork.codec.registry import CODECS
from prefork.tensor import DTYPES
from tests import conformance, judging
from tests.conformance import Verdict, judge_all, load_cases, summary
from tests.plain_ort import Plain

EVERY = 8
NEVER = {"COMPLEX64", "COMPLEX128", "FLOAT4E2M1"}  # ONNX Runtime has no kernel for any case with these


@pytest.fixture(scope="module")
def cases() -> list[conformance.Case]:
    return load_cases(EVERY)


@pytest.mark.parametrize("in_memory", [False, True], ids=["file", "memory"])
def test_what_plain_onnxruntime_passes_passes(cases: list[conformance.Case], in_memory: bool) -> None:
    verdicts = list(judge_all(cases, in_memory=in_memory))
    print("\n".join(summary(cases, verdicts)))
    assert sorted(v.name for v in verdicts) == sorted(c.name for c in cases)
    judged = {v.name for v in verdicts if v.plain == "pass"}
    assert len(judged) >= 250
    assert [v for v in verdicts if v.name in judged and not v.passed] == []
    assert {d for c in cases if c.name in judged for d in c.dtypes} == DTYPES.keys() - NEVER


def test_a_wrong_answer_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in load_cases() if case.name == "test_relu")
    plain = Plain(case.model)
    assert judging.judge_ours(case, plain, tmp_path) == ("identical", "")
    honest = judging.call

    def off_by(step: float) -> None:
        monkeypatch.setattr(
            judging, "call", lambda *args: {name: value + np.float32(step) for name, value in honest(*args).items()}
        )

    off_by(1e-5)
    assert judging.judge_ours(case, plain, tmp_path)[0] in ("within tolerance", "differs")
    off_by(1.0)
    verdict, why = judging.judge_ours(case, plain, tmp_path)
    assert verdict == "differs" and next(iter(CODECS.values())).CODEC.name.lower() in why


def test_a_crash_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [case for case in load_cases() if case.name in ("test_abs", "test_exp", "test_neg", "test_relu")]
    honest = judging.judge_ours

    def fragile(case: conformance.Case, plain: Plain, folder: Path, *, in_memory: bool) -> tuple[str, str]:
        if case.name == "test_exp":
            os._exit(3)
        return honest(case, plain, folder, in_memory=in_memory)

    monkeypatch.setattr(judging, "judge_ours", fragile)
    verdicts = {v.name: v for v in judge_all(few)}
    assert verdicts.pop("test_exp") == Verdict("test_exp", "pass", "crash", "the process ended with 3")
    assert len(verdicts) == 3 and all(v.passed for v in verdicts.values())


def test_the_command_prints_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--part", "3/200"]) == 0
    out = capsys.readouterr().out
    assert "plain onnxruntime:" in out and "through prefork:" in out and "FP32" in out
