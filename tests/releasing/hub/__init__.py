"""A Hub on loopback: the clients' requests for kernel repositories, served from git repositories.

It stands in for the Hub where a test needs one; with `HF_ENDPOINT=hub.url`, the real clients talk to it.
"""

from .server import Hub

__all__ = ["Hub"]
