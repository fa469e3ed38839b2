"""Runs every file under valid/ and invalid/. A case is a TOML file; adding one needs no code.

    about     what is right or wrong with it
    kind, codec, body          names of message.Kind and message.Codec, and the bytes of one body; or
    stream, max_body, closed   the bytes of a connection, the largest body allowed, whether the peer then closes
    limits    a table of Limits' fields that differ from the defaults
    value     JSON: the decoded message (body) or the list of frames (stream), empty fields left out
    again     true: writing the value gives the same bytes
    arrays    true: the error comes when the tensors become arrays, not before
    code, message              the error: its canonical code, and a part of its text

Bytes are written as in tests/codec/hexdump.py.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prefork.codec.frame import Event, Frame, FrameReader
from prefork.codec.limits import Limits
from prefork.codec.message import Codec, InferReply, InferRequest, Kind, Message
from prefork.codec.registry import codec_of
from prefork.errors import Code, ProtocolError, StatusError
from tests.codec.hexdump import parse
from tests.codec.plain import plain

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*valid/*.toml"))


def decode(case: dict[str, Any]) -> Message:
    """The message in the case's body; where arrays are asked for, its tensors made into those."""
    codec = codec_of(Codec[case["codec"]])
    message = codec.decode(Kind[case["kind"]], parse(case["body"]), Limits(**case.get("limits", {})))
    if case.get("arrays", "value" in case) and isinstance(message, InferRequest | InferReply):
        for tensor in message.inputs if isinstance(message, InferRequest) else message.outputs:
            tensor.to_numpy()
    return message


def read(case: dict[str, Any]) -> tuple[list[Event], ProtocolError | None]:
    """The stream's events and its end."""
    reader = FrameReader(case.get("max_body", 1 << 20))
    events = reader.receive(parse(case["stream"]))
    if reader.error is None and case.get("closed"):
        with pytest.raises(ProtocolError):
            reader.eof()
    return events, reader.error


def frame_as_plain(event: Event) -> dict[str, Any]:
    if isinstance(event, Frame):
        return {"id": event.request_id, "kind": event.kind, "codec": event.codec, "body": bytes(event.body).hex()}
    return {"id": event.request_id, "kind": event.kind, "codec": event.codec, "oversize": event.size}


def check_body(case: dict[str, Any]) -> None:
    if "code" in case:
        with pytest.raises(StatusError) as caught:
            decode(case)
        assert caught.value.code == Code[case["code"]]
        assert case["message"] in caught.value.message
        assert len(caught.value.message) < 5000
        return
    message = decode(case)
    assert plain(message) == json.loads(case["value"])
    if case.get("again"):
        assert codec_of(Codec[case["codec"]]).encode(Kind[case["kind"]], message) == parse(case["body"])


def check_stream(case: dict[str, Any]) -> None:
    events, error = read(case)
    assert [frame_as_plain(event) for event in events] == json.loads(case.get("value", "[]"))
    assert ("message" in case) == (error is not None)
    if error is not None:
        assert case["message"] in error.message


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_case(path: Path) -> None:
    case = tomllib.loads(path.read_text())
    assert case["about"]
    assert ("message" in case) == (path.parent.name == "invalid")
    if "stream" in case:
        check_stream(case)
    else:
        check_body(case)


def test_there_are_enough() -> None:
    assert sum(path.parent.name == "invalid" for path in CASES) >= 40
