"""The classes that protoc makes of prefork/codec/open_inference.proto, in a descriptor pool of their own."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTO = "prefork/codec/open_inference.proto"


@cache
def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """What the compiler says of the file."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "set"
        arguments = ["protoc", f"-I{ROOT}", f"--descriptor_set_out={target}", PROTO]
        assert protoc.main(arguments) == 0
        (file,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    return file


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file_descriptor().SerializeToString())
    return pool


def message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"inference.{name}"))
