"""Messages and codecs: what crosses between server and clients, byte by byte."""

from ntkfl.wire.message import Message, pack_jacobian, pack_labels, unpack_jacobian

__all__ = ["Message", "pack_jacobian", "pack_labels", "unpack_jacobian"]
