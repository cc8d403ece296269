"""`WeightChunk` messages without protobuf's two copies of the payload; the bytes on the wire are the same.

A chunk is field 1 (`offset`, varint) and field 2 (`data`, length-delimited), each left out when zero or empty.
"""

from __future__ import annotations

from typing import NamedTuple

from services.errors import WeightsError

_OFFSET_TAG = 0x08
_DATA_TAG = 0x12
_MAX_VARINT_BYTES = 10


class Chunk(NamedTuple):
    """`data` belongs at byte `offset` of the body."""

    offset: int
    data: memoryview


def encode(chunk: Chunk) -> bytes:
    header = bytearray()
    if chunk.offset:
        header.append(_OFFSET_TAG)
        _append_varint(header, chunk.offset)
    if len(chunk.data):
        header.append(_DATA_TAG)
        _append_varint(header, len(chunk.data))
    return b"".join((header, chunk.data))


def decode(message: bytes) -> Chunk:
    """Raises `WeightsError` for anything but one well-formed chunk."""
    offset, data, at = 0, memoryview(b""), 0
    view = memoryview(message)
    while at < len(message):
        tag = message[at]
        value, at = _read_varint(message, at + 1)
        if tag == _OFFSET_TAG:
            offset = value
        elif tag == _DATA_TAG and value <= len(message) - at:
            data = view[at : at + value]
            at += value
        else:
            raise WeightsError(f"a weight chunk is malformed at byte {at} (tag {tag:#x})")
    return Chunk(offset, data)


def _append_varint(header: bytearray, value: int) -> None:
    while value > 0x7F:
        header.append(value & 0x7F | 0x80)
        value >>= 7
    header.append(value)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at
    raise WeightsError(f"a weight chunk is cut short at byte {at}")
