"""Messages and codecs: what crosses between server and clients, byte by byte."""

from ntkfl.wire.jacobians import pack_jacobian, unpack_jacobian
from ntkfl.wire.message import Message, join_rows, pack_labels, split_rows
from ntkfl.wire.topk import decode_topk, encode_topk, pack_topk, topk_bytes, unpack_topk

__all__ = [
    "Message",
    "decode_topk",
    "encode_topk",
    "join_rows",
    "pack_jacobian",
    "pack_labels",
    "pack_topk",
    "split_rows",
    "topk_bytes",
    "unpack_jacobian",
    "unpack_topk",
]
