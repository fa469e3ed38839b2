"""Broken frames without end: mutations of valid frames of both codecs, the same for the same seed.

`mutations` is for parsers here and for a living server elsewhere; what comes out may by chance still be valid.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

from prefork.codec.frame import HEADER_SIZE, encode_frame
from prefork.codec.registry import CODECS
from tests.codec.samples import MESSAGES

LENGTHS = (0, 1, 23, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
Mutation = Callable[[random.Random, bytes], bytes]


def corpus() -> list[bytes]:
    """One valid frame for each codec and sample; large ones shortened in their tensors would no longer be valid."""
    frames: list[bytes] = []
    for number, codec in CODECS.items():
        for request_id, (kind, message) in enumerate(MESSAGES, start=1):
            frames.append(encode_frame(kind, number, request_id, codec.encode(kind, message), 1000))
    return [frame for frame in frames if len(frame) < 10_000]


def flip(rng: random.Random, frame: bytes) -> bytes:
    """One to eight bytes changed."""
    out = bytearray(frame)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, rng.randrange(256)))
    return bytes(out)


def flip_body(rng: random.Random, frame: bytes) -> bytes:
    """The header stays right, so that the codec sees the change."""
    if len(frame) == HEADER_SIZE:
        return frame
    return frame[:HEADER_SIZE] + flip(rng, frame[HEADER_SIZE:])


def truncate(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def truncate_body(rng: random.Random, frame: bytes) -> bytes:
    """A shorter body under a header that says so."""
    return resize(frame, frame[HEADER_SIZE : rng.randint(HEADER_SIZE, len(frame))])


def claim(rng: random.Random, frame: bytes) -> bytes:
    """Another length in the header."""
    return frame[:16] + struct.pack("<I", rng.choice(LENGTHS)) + frame[20:]


def claim_inside(rng: random.Random, frame: bytes) -> bytes:
    """Another length or number inside the body, in either byte order."""
    if len(frame) < HEADER_SIZE + 4:
        return frame
    position = rng.randint(HEADER_SIZE, len(frame) - 4)
    return frame[:position] + struct.pack(rng.choice("<>") + "I", rng.choice(LENGTHS)) + frame[position + 4 :]


def splice(rng: random.Random, frame: bytes) -> bytes:
    """A piece of a body doubled, moved or taken out, the header right."""
    body = frame[HEADER_SIZE:]
    a, b = sorted((rng.randint(0, len(body)), rng.randint(0, len(body))))
    piece = body[a:b]
    at = rng.randint(0, len(body))
    return resize(frame, rng.choice((body[:at] + piece + body[at:], body[:a] + body[b:], piece + body)))


def swap_kind(rng: random.Random, frame: bytes) -> bytes:
    """A right body under another kind or codec."""
    return frame[:5] + bytes((rng.randrange(4), rng.choice((*range(14), 101, 102, 103, 255)))) + frame[7:]


def nest(rng: random.Random, frame: bytes) -> bytes:
    """Deep msgpack or protobuf groups in front of the body."""
    return resize(frame, rng.choice((b"\x91", b"\x81\xa1a", b"\x81", b"\x0b", b"\x2a\x00")) * rng.randint(1, 3000))


def resize(frame: bytes, body: bytes) -> bytes:
    """The frame with another body."""
    return frame[:16] + struct.pack("<I", len(body)) + frame[20:HEADER_SIZE] + body


MUTATIONS: tuple[Mutation, ...] = (
    flip, flip_body, flip_body, flip_body, truncate, truncate_body, claim, claim_inside, splice, splice,
    swap_kind, nest,
)  # fmt: skip


def mutations(seed: int) -> Iterator[bytes]:
    """Mutated frames without end; often several mutations in one, sometimes another frame behind it."""
    rng = random.Random(seed)
    frames = corpus()
    while True:
        frame = rng.choice(frames)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if len(frame) >= HEADER_SIZE:
                frame = rng.choice(MUTATIONS)(rng, frame)
        yield frame + rng.choice(frames) if rng.random() < 0.1 else frame
