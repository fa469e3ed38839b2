"""The files under conf/ for systemd and containers: they agree with the defaults and codes of the server, and parse."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from prefork.config import ServerConfig, common, entries
from prefork.errors import ConfigError, ModelError, SegmentCorrupt, SegmentFull
from prefork.fleet import KILL_MARGIN

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
GRACEFUL, WORKER, BIND = (ServerConfig.__dataclass_fields__[name].default for name in
                          ("graceful_timeout", "worker_timeout", "bind"))  # fmt: skip


def unit(name: str) -> dict[str, list[str]]:
    """Each key with its values in order; no key of ours stands in two sections."""
    found = defaultdict(list)
    for line in (CONF / name).read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found[key].append(value)
    return dict(found)


def one(name: str, key: str) -> str:
    (value,) = unit(name)[key]
    return value


def test_the_service_outwaits_its_server() -> None:
    assert float(one("prefork.service", "TimeoutStopSec")) > GRACEFUL + KILL_MARGIN
    assert float(one("prefork.service", "WatchdogSec")) > 2 * WORKER
    assert (one("prefork.service", "KillMode"), one("prefork.service", "KillSignal")) == ("mixed", "SIGTERM")


def test_what_a_restart_does_not_mend_is_not_restarted() -> None:
    codes = {int(code) for code in one("prefork.service", "RestartPreventExitStatus").split()}
    assert codes == {ConfigError.exit_code, ModelError.exit_code}
    assert not codes & {SegmentFull.exit_code, SegmentCorrupt.exit_code, 0}


def test_the_socket_has_the_address_of_the_configuration() -> None:
    address, path = unit("prefork.socket")["ListenStream"]
    assert address == BIND and path.startswith("/run/") and one("prefork.socket", "ReusePort") == "yes"


def systemd() -> int:
    """Its version, 0 for none."""
    if not shutil.which("systemd-analyze"):
        return 0
    said = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.split()[1])


def test_the_exposure_is_low() -> None:
    if systemd() < 250:
        pytest.skip("needs systemd-analyze of systemd 250 or later")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20"]  # tenths
    ran = subprocess.run([*command, str(CONF / "prefork.service")], capture_output=True, text=True, check=False)
    assert "Overall exposure level for prefork.service" in ran.stdout and ran.returncode == 0, ran.stdout


def test_systemd_reads_the_units_without_a_word(tmp_path: Path) -> None:
    if systemd() < 254:
        pytest.skip("needs systemd-analyze of systemd 254 or later")
    for name in ("prefork.service", "prefork.socket"):
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", (CONF / name).read_text())
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("prefork.service", "prefork.socket")]
    ran = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def instructions() -> list[tuple[str, str]]:
    """Of the Containerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", (CONF / "Containerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, rest in lines]


def test_the_image_copies_what_there_is_and_runs_what_we_install() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for word, rest in instructions():
        match word:
            case "COPY" if not rest.startswith("--from"):
                assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
            case "ENTRYPOINT":
                assert json.loads(rest)[0] in scripts
            case "HEALTHCHECK":
                assert json.loads(rest.partition(" CMD ")[2])[0] in scripts
    words = [word for word, _ in instructions()]
    assert words.count("FROM") == 2 and words.count("HEALTHCHECK") == 1
    (user,) = [rest for word, rest in instructions() if word == "USER"]
    assert not user.startswith(("0", "root"))


@pytest.mark.parametrize("name", ["Containerfile", "compose.yaml"])
def test_every_variable_is_a_key(name: str) -> None:
    known = {entry.variable for entry in (*entries(), *common())}
    found = set(re.findall(r"PREFORK_[A-Z_]+", (CONF / name).read_text()))
    assert found and found <= known


def test_the_container_is_not_killed_while_it_drains() -> None:
    (seconds,) = re.findall(r"stop_grace_period: (\d+)s", (CONF / "compose.yaml").read_text())
    assert int(seconds) > GRACEFUL + KILL_MARGIN
