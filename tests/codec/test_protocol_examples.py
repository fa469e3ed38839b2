"""The examples of PROTOCOL.md, read and written again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prefork.codec.frame import Frame, FrameReader, encode_frame
from prefork.codec.limits import Limits
from prefork.codec.message import Codec, Kind, Message
from prefork.codec.registry import codec_of
from prefork.errors import Code
from prefork.tensor import DTYPES
from tests.codec.hexdump import parse
from tests.codec.plain import plain

TEXT = (Path(__file__).parents[2] / "PROTOCOL.md").read_text()
BLOCK = re.compile(r"^```(hex|json) ([\w-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEX = {name: body for kind, name, body in BLOCK.findall(TEXT) if kind == "hex"}
JSON = {name: json.loads(body) for kind, name, body in BLOCK.findall(TEXT) if kind == "json"}


def read(name: str) -> Frame:
    reader = FrameReader(1 << 20)
    (frame,) = reader.receive(parse(HEX[name]))
    reader.eof()
    assert isinstance(frame, Frame)
    return frame


def decode(frame: Frame) -> Message:
    if frame.codec == Codec.NONE:
        assert len(frame.body) == 0
        return None
    return codec_of(frame.codec).decode(frame.kind, frame.body)


def test_all_the_promised_examples_are_there() -> None:
    assert HEX.keys() == JSON.keys()
    kinds = {(example["kind"], example["codec"]) for example in JSON.values()}
    for kind in ("INFER", "INFER_REPLY", "ERROR", "MODEL_METADATA_REPLY"):
        assert {(kind, "MSGPACK"), (kind, "PROTOBUF")} <= kinds
    assert {("CANCEL", "NONE"), ("GOAWAY", "NONE")} <= kinds


@pytest.mark.parametrize("name", HEX)
def test_an_example_says_what_stands_below_it(name: str) -> None:
    frame, expected = read(name), JSON[name]
    found: dict[str, Any] = {
        "kind": Kind(frame.kind).name,
        "codec": Codec(frame.codec).name,
        "request_id": frame.request_id,
        "timeout_ms": frame.timeout_ms,
        "message": plain(decode(frame)),
    }
    assert found == expected


@pytest.mark.parametrize("name", HEX)
def test_an_example_is_what_we_write(name: str) -> None:
    frame = read(name)
    message = decode(frame)
    body = b"" if message is None else codec_of(frame.codec).encode(frame.kind, message)
    assert encode_frame(frame.kind, frame.codec, frame.request_id, body, frame.timeout_ms) == parse(HEX[name])


def test_the_tables_are_complete() -> None:
    for kind in Kind:
        assert re.search(rf"\| {kind.value} \| {kind.name} \||{kind.value} {kind.name}\b", TEXT), kind
    for code in Code:
        assert code == Code.OK or f"| {code.value} | {code.name} |" in TEXT
    element_types = TEXT[TEXT.index("| datatype | bits |") : TEXT.index("A packed tensor")]
    assert set(re.findall(r"\b[A-Z][A-Z0-9]+\b", element_types)) >= DTYPES.keys()
    for field in Limits.__dataclass_fields__:
        assert f"`{field}`" in TEXT
