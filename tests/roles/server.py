"""The real prefork-serve of black-box tests; it stands in bench/server.py, which the benches share."""

from bench.server import REPOSITORY, Server

__all__ = ("REPOSITORY", "Server")
