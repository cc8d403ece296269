"""A named set of tensors in flight: what it holds, where each lies in the body, and how to prove it arrived."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.errors import WeightsError

DIGEST_BYTES = 16


class TensorMeta(NamedTuple):
    """`dtype` is torch's name without `torch.`; `offset` and `nbytes` place it in the concatenated body."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: bytes


class Source(NamedTuple):
    """Where a body can be fetched: `transport` names the backend, `address` is host:port."""

    transport: str
    address: str


@dataclass(frozen=True)
class Manifest:
    """One weight version on the wire."""

    version: int
    transfer_id: str
    tensors: tuple[TensorMeta, ...]
    sources: tuple[Source, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def digest(self) -> bytes:
        """Of everything a receiver relies on: names, dtypes, shapes, places and the tensors' digests."""
        state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for tensor in self.tensors:
            state.update(repr(tensor).encode())
        return state.digest()


def body_digest(body: memoryview | bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def layout(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> list[TensorMeta]:
    """Place `(name, dtype, shape, nbytes)` one after another, digests still empty."""
    placed, offset = [], 0
    for name, dtype, shape, nbytes in tensors:
        placed.append(TensorMeta(name, dtype, tuple(shape), offset, nbytes, b""))
        offset += nbytes
    return placed


def verify(manifest: Manifest, body: memoryview) -> None:
    """Raise `WeightsError` naming the first tensor whose bytes are not what the manifest says."""
    if len(body) != manifest.total_bytes:
        raise WeightsError(
            f"weights v{manifest.version}: body has {len(body)} bytes, manifest says {manifest.total_bytes}"
        )
    for tensor in manifest.tensors:
        if body_digest(body[tensor.offset : tensor.offset + tensor.nbytes]) != tensor.digest:
            raise WeightsError(f"weights v{manifest.version}: digest of `{tensor.name}` does not match")
