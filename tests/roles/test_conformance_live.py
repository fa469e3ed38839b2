"""A fixed part of the backend cases through running servers. All: `python -m tests.roles.conformance_live`."""

from __future__ import annotations

import pytest

from prefork.tensor import DTYPES
from tests.backend_cases import load_cases
from tests.model.test_conformance import NEVER
from tests.roles.conformance_live import judge, runnable, summary

EVERY = 12
AT_LEAST = 200


@pytest.mark.timeout(600)  # two hundred models are loaded, one after the other
def test_what_plain_onnxruntime_passes_passes_over_the_socket() -> None:
    cases, plain = runnable(load_cases(EVERY))
    verdicts = judge(cases)
    print("\n".join(summary(cases, plain, verdicts)))
    assert [verdict for verdict in verdicts if not verdict.passed] == []
    assert len(verdicts) >= AT_LEAST
    assert {dtype for case in cases for dtype in case.dtypes} == DTYPES.keys() - NEVER
