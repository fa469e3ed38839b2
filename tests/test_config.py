"""Defaults, file, environment and flags: which wins, what is refused and how; conf/prefork.toml is complete."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from prefork.config import SECTIONS, Config, ModelConfig, common, entries, entries_of
from prefork.effective import to_toml
from prefork.errors import ConfigError
from prefork.layers import control_path, load
from prefork.model import evaluate
from prefork.options import BIND, METRICS, NAME, read, show_size, size, split_bind

REFERENCE = Path(__file__).parents[1] / "conf" / "prefork.toml"
MIB = 2**20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "some.onnx"
    path.write_bytes(b"\x08\x08")
    return path


def write(folder: Path, text: str) -> Path:
    path = folder / "conf.toml"
    path.write_text(text)
    return path


def values(config: Config) -> dict[str, Any]:
    found = asdict(config)
    del found["sources"]
    return found


def refusal(flags: Mapping[str, str], environ: Mapping[str, str], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, **options)
    assert caught.value.exit_code == 78
    return caught.value.message


def test_reference_lists_every_key_with_its_default() -> None:
    text = REFERENCE.read_text()
    found = tomllib.loads(text)
    assert {section: list(keys) for section, keys in found.items()} == {
        section: [entry.name for entry in entries_of(section, cls)] for section, cls in SECTIONS.items()
    }
    assert values(load({}, {}, file=REFERENCE)) == values(load({}, {}))
    example = tomllib.loads(re.sub(r"^# ?", "", text[text.index("# [[models]]") :], flags=re.M))
    assert [entry.name for entry in entries_of("models", ModelConfig)] == list(example["models"][0])


def test_each_key_of_the_reference_has_a_comment() -> None:
    lines = REFERENCE.read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    assert len(keys) == len(list(entries()))
    assert all(lines[number - 1].startswith("# ") for number in keys)


def test_spellings_of_keys_are_unique() -> None:
    found = [*entries(), *common()]
    assert len({entry.flag for entry in found}) == len({entry.variable for entry in found}) == len(found)


def test_metrics_are_those_of_the_search() -> None:
    assert METRICS == evaluate.METRICS


def test_defaults() -> None:
    config = load({}, {"TMPDIR": "/tmp"})
    assert (config.server.bind, config.telemetry.metrics_bind) == ("127.0.0.1:7070", "")
    assert (config.limits.max_frame_bytes, config.limits.max_in_flight_bytes) == (64 * MIB, 256 * MIB)
    assert [model.name for model in config.models] == ["digits"]
    assert config.models[0].path.is_file()
    assert set(config.sources.values()) == {"default"}


def test_the_later_layer_wins_and_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "[server]\nworkers = 1\nbacklog = 2\n\n[limits]\nmax_dims = 3\n")
    environ = {"PREFORK_BACKLOG": "20", "PREFORK_MAX_DIMS": "30"}
    config = load({"max_dims": "31"}, environ, file=file)
    assert (config.server.workers, config.server.backlog, config.limits.max_dims) == (1, 20, 31)
    assert config.sources["server.workers"] == f"{file}:2"
    assert config.sources["server.backlog"] == "PREFORK_BACKLOG"
    assert config.sources["limits.max_dims"] == "--max-dims"
    assert config.sources["limits.max_tensors"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "[server]\nworkers = 7\n")
    assert load({}, {"PREFORK_CONFIG": str(file)}).server.workers == 7
    other = tmp_path / "other.toml"
    other.write_text("[server]\nworkers = 8\n")
    assert load({}, {"PREFORK_CONFIG": str(file)}, file=other).server.workers == 8


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/tmp"}, "/run/a"),
        ({"XDG_RUNTIME_DIR": "/tmp"}, "/tmp/prefork-serve"),
        ({"XDG_RUNTIME_DIR": "/nowhere"}, None),
        ({"PREFORK_RUNTIME_DIR": "/run/c", "RUNTIME_DIRECTORY": "/run/a"}, "/run/c"),
    ],
)
def test_places(environ: dict[str, str], folder: str | None) -> None:
    server = load({}, environ).server
    if folder is None:
        assert re.fullmatch(r"/tmp/prefork-serve-\d+", str(server.runtime_dir))
    else:
        assert server.runtime_dir == Path(folder)
    assert server.unix == server.runtime_dir / "prefork.sock"
    assert server.control == server.runtime_dir / "control.sock" == control_path({}, environ)


def test_sockets_can_be_named_and_left_out(tmp_path: Path) -> None:
    server = load({"unix": "", "control": "c.sock"}, {}, cwd=tmp_path).server
    assert (server.unix, server.control) == (None, tmp_path / "c.sock")


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, '[log]\nfile = "x.log"\n[[models]]\nname = "m"\npath = "some.onnx"\nquantize = "int8"\n')
    config = load({}, {}, file=file, cwd=Path("/"))
    assert config.log.file == tmp_path / "x.log"
    assert config.models == (ModelConfig(name="m", path=model, quantize="int8", warmup=None),)
    assert config.sources["models.m.path"] == f"{file}:5"


def test_models_of_the_later_layer_replace_the_others(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, '[[models]]\nname = "f"\npath = "some.onnx"\n')
    environ = {"PREFORK_MODEL": f"a={model}; b={model}"}
    assert [m.name for m in load({}, {}, file=file).models] == ["f"]
    assert [m.name for m in load({}, environ, file=file).models] == ["a", "b"]
    flags = load({"quantize": "int8"}, environ, file=file, models=[str(model), f"x={model}"])
    assert [(m.name, m.quantize) for m in flags.models] == [("some", "int8"), ("x", "int8")]
    assert flags.sources["models.x.quantize"] == "--quantize"


def test_keys_of_the_search_by_file_and_for_every_model(tmp_path: Path, model: Path) -> None:
    (tmp_path / "e.npz").write_bytes(b"PK")
    file = write(
        tmp_path,
        '[[models]]\nname = "a"\npath = "some.onnx"\nquantize = "auto"\neval = "e.npz"\naccuracy_budget = 0\n'
        '[[models]]\nname = "b"\npath = "some.onnx"\nmetric = "judge.own:score"\nmin_speedup = 2\n',
    )
    flags, environ = {"quantize_seconds": "9", "calibration": "e.npz"}, {"PREFORK_MIN_SPEEDUP": "1.5"}
    first, second = load(flags, environ, file=file, cwd=tmp_path).models
    assert (first.quantize, first.eval, first.accuracy_budget) == ("auto", tmp_path / "e.npz", 0.0)
    assert (second.quantize, second.eval, second.metric) == ("auto", None, "judge.own:score")
    for each in (first, second):
        assert (each.calibration, each.min_speedup, each.quantize_seconds) == (tmp_path / "e.npz", 1.5, 9.0)


def test_keys_of_a_search_that_is_not_made_are_warned_of(tmp_path: Path, model: Path) -> None:
    file = write(
        tmp_path,
        '[[models]]\nname = "a"\npath = "some.onnx"\nquantize = "none"\nmin_speedup = 2\nmetric = "auto"\n'
        '[[models]]\nname = "b"\npath = "some.onnx"\nmin_speedup = 3\n',
    )
    assert load({"accuracy_budget": "0.1"}, {}, file=file, cwd=tmp_path).warnings == (
        f"models.min_speedup ({file}:5) is ignored for 'a': quantize is 'none', and only 'auto' searches",
    )
    flags = {"quantize": "fp16", "accuracy_budget": "0.1"}
    why = "is ignored for 'some': quantize is 'fp16', and only 'auto' searches"
    assert load(flags, {"PREFORK_METRIC": "f1"}, models=["some.onnx"], cwd=tmp_path).warnings == (
        f"models.accuracy_budget (--accuracy-budget) {why}",
        f"models.metric (PREFORK_METRIC) {why}",
    )
    assert load({"quantize": "none"}, {}, cwd=tmp_path).warnings == ()


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"workers": "two"}, {}, "server.workers (--workers): expected an integer from 0 to 1024, found 'two'"),
        ({"workers": "1025"}, {}, "server.workers (--workers): expected an integer from 0 to 1024, found '1025'"),
        ({}, {"PREFORK_SHM": "memfd"}, "server.shm (PREFORK_SHM): expected posix or sysv, found 'memfd'"),
        ({"read_timeout": "nan"}, {}, "(--read-timeout): expected seconds from 0.001 to 86400, found 'nan'"),
        ({"max_frame_bytes": "64MB4"}, {}, "limits.max_frame_bytes (--max-frame-bytes): expected a size from 1KiB to"),
        ({"log_level": "loud"}, {}, "log.level (--log-level): expected debug or info or warning or error,"),
        ({"bind": "::1:7070"}, {}, "(--bind): expected host:port, [address]:port or :port, found '::1:7070'"),
        ({}, {"PREFORK_WORKER": "3"}, "environment variable PREFORK_WORKER is unknown; did you mean PREFORK_WORKERS?"),
        ({"default_timeout_ms": "9", "max_timeout_ms": "8"}, {}, "expected at most max_timeout_ms = 8, found 9"),
        ({"max_frame_bytes": "2GiB"}, {}, "(--max-frame-bytes): expected at most max_in_flight_bytes"),
        ({"runtime_dir": "/" + "x" * 100}, {}, "server.unix (default): expected a socket path of at most 107 bytes"),
        ({"unix": "/s", "control": "/s"}, {}, "server.unix (--unix): expected another path than server.control"),
        ({"metrics_bind": "7071"}, {}, 'expected host:port, [address]:port or :port, or "" for none, found \'7071\''),
        ({"bind": "h:1", "metrics_bind": "h:1"}, {}, "(--metrics-bind): expected another address than server.bind"),
        ({"work_dir": "/nowhere"}, {}, "server.work_dir (--work-dir): expected a folder that can be written to"),
        ({"quantize": "int4"}, {}, "models.quantize (--quantize): expected auto or none or int8 or fp16, found 'int4'"),
        ({"accuracy_budget": "0.5%"}, {}, "(--accuracy-budget): expected a number from 0 to 1, found '0.5%'"),
        ({"min_speedup": "nan"}, {}, "(--min-speedup): expected a number from 0 to 1000, found 'nan'"),
        ({}, {"PREFORK_METRIC": "acc"}, "expected auto, top1, f1, cosine, mse or module:function, found 'acc'"),
        ({"metric": "__main__:f"}, {}, "or module:function, found '__main__:f'"),
        ({"eval": "/none.npz"}, {}, "models.digits.eval (--eval): '/none.npz' cannot be read: No such file"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(flags: dict[str, str], environ: dict[str, str], said: str) -> None:
    assert said in refusal(flags, environ)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nworker = 1\n", ":2: key server.worker is unknown; did you mean workers?"),
        ("[sever]\n", ":1: section [sever] is unknown; did you mean server?"),
        ("workers = 1\n", ":1: section [workers] is unknown"),
        ('[server]\n\nworkers = "2"\n', ":3): expected an integer from 0 to 1024, found '2'"),
        ("[server]\nworkers = true\n", ":2): expected an integer from 0 to 1024, found True"),
        ("[server]\nworkers = 2.5\n", ":2): expected an integer from 0 to 1024, found 2.5"),
        ("[log]\nfile = 3\n", ":2): expected a path, or \"\" for none, found 3"),
        ("[server\n", "is not TOML: "),
        ("[models]\nname = 'x'\n", ":1: models must be written as [[models]]"),
        ("[[models]]\nname = 'x'\n", "models.path ("),
        ("[[models]]\n", "models.name ([[models]]): every model needs"),
        ("[[models]]\nname = 'x'\npath = 'no.onnx'\n", ":3): "),
        ("[[models]]\nname = 'x'\nquant = 'int8'\n", ":3: key models.quant is unknown; did you mean quantize?"),
        ("[[models]]\nname = '-x'\npath = 'some.onnx'\n", ":2): expected a name of 1 to 64 letters"),
        ("[[models]]\nname = 'x'\npath = 'some.onnx'\n" * 2, ":5): two models are called 'x'; names must differ"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_the_line(tmp_path: Path, model: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    message = refusal({}, {}, file=file)
    assert said in message
    assert str(file) in message or "[[models]])" in message


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "No such file or directory" in refusal({}, {}, file=tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not TOML" in refusal({}, {}, file=tmp_path / "binary.toml")
    assert "No such file or directory" in refusal({}, {}, models=[str(tmp_path / "none.onnx")])
    (tmp_path / "empty.onnx").touch()
    assert "expected a file with content" in refusal({}, {}, models=[str(tmp_path / "empty.onnx")])
    (tmp_path / "folder.onnx").mkdir()
    assert "Is a directory" in refusal({}, {}, models=[str(tmp_path / "folder.onnx")])


def test_variables_of_the_tests_are_left_alone() -> None:
    assert load({}, {"PREFORK_TEST_MODELS": "/x", "OTHER": "y"}).server.workers == 0


def test_two_ports_of_the_kernels_choice_may_share_an_address() -> None:
    config = load({"bind": "127.0.0.1:0", "metrics_bind": "127.0.0.1:0"}, {})
    assert config.server.bind == config.telemetry.metrics_bind == "127.0.0.1:0"


def test_effective_configuration_reads_back_the_same(tmp_path: Path, model: Path) -> None:
    flags = {"bind": "[::1]:0", "max_frame_bytes": "1MB", "read_timeout": "0.5", "unix": "", "quantize": "int8"}
    config = load(flags, {"PREFORK_PID_FILE": 'a"\x7f b'}, models=[f"m={model}"], cwd=tmp_path)
    text = to_toml(config)
    assert values(load({}, {}, file=write(tmp_path, text))) == values(config)
    lines = [line for line in text.splitlines() if line and not line.startswith("[")]
    assert len(lines) == len(list(entries())) + len(list(entries_of("models", ModelConfig)))
    assert all(re.search(r"  # \S", line) for line in lines)
    assert re.search(r"^max_frame_bytes = 1000000 +# --max-frame-bytes$", text.replace('"', ""), re.M)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", None), ("1024", 1024), ("64MiB", 64 * MIB), ("1 kB", None), ("2 kB", 2000), ("1GiB", 2**30)],
)
def test_sizes(text: str, count: int | None) -> None:
    kind = size(1024, 2**40)
    if count is None:
        with pytest.raises(ConfigError):
            read(kind, "k", text, "test", text=True)
    else:
        assert read(kind, "k", text, "test", text=True) == count
        assert read(kind, "k", show_size(count), "test", text=False) == count


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("[::1]:7070", ("::1", 7070)),
        (":0", ("", 0)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_bind_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_bind(text) == parts
    assert read(BIND, "server.bind", text, "test", text=True) == text


@pytest.mark.parametrize(
    "text", ["7070", "host", "host:", "host:65536", "::1:70", "[::1:70", "a b:1", "h:-1", "h:\u0663"]
)
def test_bad_bind_addresses(text: str) -> None:
    with pytest.raises(ConfigError):
        read(BIND, "server.bind", text, "test", text=True)


@pytest.mark.parametrize("text", ["", ".x", "a/b", "a" * 65, "\u00e9", "x\n", "a b"])
def test_bad_model_names(text: str) -> None:
    with pytest.raises(ConfigError):
        read(NAME, "models.name", text, "test", text=True)
