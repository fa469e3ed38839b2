"""Clients of a prefork-serve server: `Client` blocks and is shared by threads, `AsyncClient` is for asyncio.

They raise the classes of prefork/errors.py. Of the project they import errors, tensor, value and codec, nothing else.
"""

from prefork.client.aio import AsyncClient
from prefork.client.blocking import Client

__all__ = ("AsyncClient", "Client")
