"""Messages and codecs: what crosses between server and clients, byte by byte."""

from ntkfl.wire.message import Message

__all__ = ["Message"]
