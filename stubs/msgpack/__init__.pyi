from collections.abc import Callable
from typing import Any

from msgpack import exceptions as exceptions

class Packer:
    def __init__(
        self,
        *,
        default: Callable[[Any], Any] | None = ...,
        use_single_float: bool = ...,
        autoreset: bool = ...,
        use_bin_type: bool = ...,
        strict_types: bool = ...,
    ) -> None: ...
    def pack(self, obj: Any) -> bytes: ...

def packb(o: Any, *, use_bin_type: bool = ..., strict_types: bool = ...) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    raw: bool = ...,
    use_list: bool = ...,
    strict_map_key: bool = ...,
    timestamp: int = ...,
    object_hook: Callable[[dict[Any, Any]], Any] | None = ...,
    list_hook: Callable[[list[Any]], Any] | None = ...,
    max_str_len: int = ...,
    max_bin_len: int = ...,
    max_array_len: int = ...,
    max_map_len: int = ...,
    max_ext_len: int = ...,
) -> Any: ...
