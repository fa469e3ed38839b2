"""What is refused, what is warned of, and that each message names the thing, the need, the finding and the remedy."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefork import needs, preflight
from prefork.config import Config, common
from prefork.errors import ConfigError, SegmentFull
from prefork.facts import UNLIMITED, Facts, Room
from prefork.layers import load
from prefork.preflight import Finding, connections, examine, fit, refuse

MIB = 1 << 20
PLENTY = Facts(
    shm=(Room("/dev/shm", 1 << 40, "enlarge it"),),
    memory=(Room("memory", 1 << 40, "free some"),),
    tasks=(Room("pids", 100_000, "raise TasksMax="),),
    open_files=1_000_000,
    max_map_count=65530,
)


def config(folder: Path, megabytes: int = 100, **flags: str) -> Config:
    """Of one sparse model file, which nobody reads."""
    path = folder / "m.onnx"
    with path.open("wb") as file:
        file.truncate(megabytes * MIB)
    return load({"workers": "4", "runtime_dir": str(folder), "quantize": "none", **flags}, {}, models=[str(path)])


def look(folder: Path, found: Facts, **flags: str) -> list[Finding]:
    return list(examine(needs.of(config(folder, **flags)), found))


def shm(megabytes: int) -> dict[str, Any]:
    return {"shm": (Room("/dev/shm", megabytes * MIB, "enlarge it"),)}


def memory(megabytes: int) -> dict[str, Any]:
    return {"memory": (Room("control group /x", megabytes * MIB, "raise its limit"),)}


def commit(megabytes: int) -> dict[str, Any]:
    return {"commit": Room("what the kernel may promise", megabytes * MIB, "raise vm.overcommit_ratio")}


CASES = [
    (shm(49), "refusal", ("segments take at least 50.0 MiB", "/dev/shm has 49.0 MiB left", "enlarge it")),
    (shm(199), "warning", ("segments take up to 200.0 MiB", "/dev/shm has 199.0 MiB left", "enlarge it")),
    (shm(399), "warning", ("for a reload", "up to 400.0 MiB", "/dev/shm has 399.0 MiB left")),
    (memory(129), "refusal", ("4 worker(s) take at least 130.0 MiB", "/x has 129.0 MiB left", "raise its limit")),
    (memory(691), "warning", ("4 worker(s) take up to 692.0 MiB", "/x has 691.0 MiB left", "raise its limit")),
    (commit(223), "refusal", ("4 worker(s) are promised at least 224.0 MiB", "223.0 MiB left", "vm.overcommit_ratio")),
    (commit(1391), "warning", ("promised up to 1392.0 MiB", "1391.0 MiB left", "vm.overcommit_ratio")),
    ({"open_files": 74}, "refusal", ("a worker needs 59 (16 own, 11 for listening", "16 connections", "is 74")),
    ({"open_files": 49}, "refusal", ("the master needs 54 (20 own, 4 for each of 4", "is 49", "LimitNOFILE=")),
    (
        {"open_files": 1024},
        "warning",
        ("max_connections 4096 becomes 965", "needs 59 (16 own", "RLIMIT_NOFILE is 1024", "to 4155"),
    ),
    (
        {"tasks": (Room("RLIMIT_NPROC (20)", 13, "raise it (ulimit -u)"),)},
        "refusal",
        ("4 worker(s) and all else are 14", "RLIMIT_NPROC (20) leaves 13", "ulimit -u"),
    ),
    ({"address_space": 305 * MIB}, "refusal", ("maps at least 306.0 MiB", "RLIMIT_AS is 305.0 MiB", "LimitAS=")),
    ({"address_space": 1523 * MIB}, "warning", ("maps up to 1524.0 MiB", "RLIMIT_AS is 1523.0 MiB", "ulimit -v")),
    ({"data": 63 * MIB}, "refusal", ("has at least 64.0 MiB", "RLIMIT_DATA is 63.0 MiB", "LimitDATA=")),
    ({"data": 555 * MIB}, "warning", ("has up to 556.0 MiB", "RLIMIT_DATA is 555.0 MiB", "ulimit -d")),
    ({"file_size": 49 * MIB}, "refusal", ("files, of at least 50.0 MiB", "RLIMIT_FSIZE is 49.0 MiB", "--shm sysv")),
    ({"file_size": 199 * MIB}, "warning", ("files, of up to 200.0 MiB", "RLIMIT_FSIZE is 199.0 MiB", "ulimit -f")),
    ({"max_map_count": 399}, "refusal", ("has at least 400", "vm.max_map_count is 399", "sysctl -w")),
    ({"max_map_count": 1599}, "warning", ("has up to 1600", "is 1599", "sysctl -w vm.max_map_count=65530")),
    ({"core": UNLIMITED}, "info", ("cores are written, of any size (RLIMIT_CORE)", "ulimit -c 0")),
    ({"core": 8 * MIB}, "info", ("cores are written, up to 8.0 MiB (RLIMIT_CORE)", "LimitCORE=0")),
    ({"core_piped": True}, "info", ("cores go to a program (kernel.core_pattern)",)),
]


@pytest.mark.parametrize(("short", "level", "words"), CASES, ids=[f"{level}-{words[0]}" for _, level, words in CASES])
def test_a_finding(tmp_path: Path, short: dict[str, Any], level: str, words: tuple[str, ...]) -> None:
    found = [finding for finding in look(tmp_path, replace(PLENTY, **short)) if finding.level == level]
    messages = [finding.message for finding in found]
    assert any(all(word in message for word in words) for message in messages), messages


@pytest.mark.parametrize(
    "enough",
    [
        shm(400), memory(692), commit(1392), {"open_files": 4155}, {"max_map_count": 1600},
        {"tasks": (Room("pids", 14, ""),)}, {"address_space": 1524 * MIB}, {"data": 556 * MIB},
        {"file_size": 200 * MIB}, {},
    ],
    ids=str,
)  # fmt: skip
def test_just_enough_is_no_finding(tmp_path: Path, enough: dict[str, Any]) -> None:
    assert look(tmp_path, replace(PLENTY, **enough)) == []


def test_the_form_and_the_kind_count(tmp_path: Path) -> None:
    scarce = replace(PLENTY, **shm(90), file_size=MIB)
    assert [finding.level for finding in look(tmp_path, scarce)] == ["warning", "refusal"]
    assert [finding.level for finding in look(tmp_path, scarce, shm="sysv", quantize="int8")] == ["warning"]
    assert "for a reload" in look(tmp_path, scarce, shm="sysv", quantize="int8")[0].message


def test_external_data_counts(tmp_path: Path) -> None:
    given = config(tmp_path, 1)
    with (tmp_path / "m.onnx.data").open("wb") as file:
        file.truncate(9 * MIB)
    assert needs.of(given).largest == 10 * MIB


def test_threads_are_tasks(tmp_path: Path) -> None:
    assert needs.of(config(tmp_path, threads="4")).tasks == needs.of(config(tmp_path)).tasks + 4 * 3


def test_without_workers_the_cpus_decide(tmp_path: Path) -> None:
    given = config(tmp_path, workers="0")
    assert needs.of(given).workers >= 1


def test_refusals_are_raised_with_their_class(tmp_path: Path) -> None:
    with pytest.raises(SegmentFull, match=r"/dev/shm has 1\.0 MiB left"):
        refuse(look(tmp_path, replace(PLENTY, **shm(1))))
    with pytest.raises(ConfigError, match=r"vm.max_map_count is 1;"):
        refuse(look(tmp_path, replace(PLENTY, max_map_count=1)))
    refuse(look(tmp_path, replace(PLENTY, **shm(60))))  # only a warning


def test_connections_are_what_fits(tmp_path: Path) -> None:
    given = config(tmp_path)
    wanted = needs.of(given)
    assert fit(given, wanted, replace(PLENTY, open_files=256)).limits.max_connections == 256 - 59
    assert fit(given, wanted, PLENTY).limits.max_connections == 4096
    assert connections(needs.of(config(tmp_path, max_connections="5")), replace(PLENTY, open_files=64)) == 5


def test_few_connections_are_no_refusal_when_no_more_are_wanted(tmp_path: Path) -> None:
    assert look(tmp_path, replace(PLENTY, open_files=64), max_connections="5") == []


def test_this_machine_is_told(tmp_path: Path) -> None:
    stream = io.StringIO()
    preflight.tell(config(tmp_path, 1, max_connections="1000000"), stream)
    assert "prefork-serve: warning: open files: max_connections 1000000 becomes " in stream.getvalue()


def test_every_form_has_a_share(tmp_path: Path) -> None:
    (kind,) = {entry.key.kind for entry in common() if entry.name == "quantize"}
    assert len(kind.choices) >= 4
    for form in kind.choices:
        wanted = needs.of(config(tmp_path, quantize=form))
        assert 0 < wanted.least < wanted.likely
