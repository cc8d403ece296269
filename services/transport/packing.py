"""The sender's side of a body: lay tensors out, fill them in, and prove what a receiver is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from services.errors import WeightsError
from services.transport.manifest import DIGEST_BYTES, Manifest, TensorMeta, body_digest, layout

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_ALIGNMENT = 64


class TensorSpec(NamedTuple):
    """`dtype` is torch's name without `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Raises `WeightsError` for a dtype that is not known."""
        return tensor_bytes(self.name, self.dtype, self.shape)


def tensor_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor. Raises `WeightsError` for an unknown dtype or a negative dimension."""
    if dtype not in ITEM_BYTES:
        raise WeightsError(f"tensor `{name}`: dtype `{dtype}` is not one of {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape):
        raise WeightsError(f"tensor `{name}`: shape {list(shape)} has a negative dimension")
    return math.prod(shape) * ITEM_BYTES[dtype]


def allocate(nbytes: int) -> memoryview:
    """A writable, uninitialised, 64-byte aligned buffer of `nbytes` bytes."""
    raw = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return memoryview(raw[start : start + nbytes])  # type: ignore[arg-type]


class Packer:
    """One body, filled tensor by tensor, so that only one whole copy of the weights is ever held.

    Sizes are known from `specs`; tensors come in any order, each once. Filling only copies, so that whoever owns the
    weights is held up no longer than that; `finish` reads all of it once more, and may run elsewhere.
    """

    def __init__(self, version: int, transfer_id: str, specs: Iterable[TensorSpec]) -> None:
        """Raises `WeightsError` for an unknown dtype or a name given twice."""
        self.version = version
        self._transfer_id = transfer_id
        self._places: dict[str, TensorMeta] = {}
        for place in layout((spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in specs):
            if place.name in self._places:
                raise WeightsError(f"weights v{version}: tensor `{place.name}` is given twice")
            self._places[place.name] = place
        self._unfilled = set(self._places)
        self.body = allocate(sum(place.nbytes for place in self._places.values()))

    def room(self, name: str) -> memoryview:
        """Where the caller writes one tensor's contiguous little-endian bytes, before `finish`.

        Raises `WeightsError` for an unknown name, or one that was asked for before.
        """
        place = self._places.get(name)
        if place is None:
            raise WeightsError(f"weights v{self.version}: tensor `{name}` is not among those laid out")
        if name not in self._unfilled:
            raise WeightsError(f"weights v{self.version}: tensor `{name}` is filled twice")
        self._unfilled.remove(name)
        return self.body[place.offset : place.offset + place.nbytes]

    def fill(self, name: str, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Copy one tensor's contiguous little-endian bytes to its place.

        Raises `WeightsError` like `room`, or for another size than the spec says.
        """
        target = self.room(name)
        given = data.nbytes if isinstance(data, memoryview | np.ndarray) else len(data)
        if given != target.nbytes:
            place = self._places[name]
            raise WeightsError(
                f"weights v{self.version}: tensor `{name}` has {given} bytes, "
                f"{place.dtype} {list(place.shape)} needs {place.nbytes}"
            )
        target[:] = _flat(data)

    def finish(self) -> Manifest:
        """The manifest with the digests of what was filled in, without sources; the body must not change any more.

        Raises `WeightsError` naming the first tensor that was never filled.
        """
        for name in self._places:
            if name in self._unfilled:
                raise WeightsError(f"weights v{self.version}: tensor `{name}` was not filled")
        return Manifest(
            self.version,
            self._transfer_id,
            tuple(
                place._replace(digest=body_digest(self.body[place.offset : place.offset + place.nbytes]))
                for place in self._places.values()
            ),
        )


def pack(
    version: int,
    transfer_id: str,
    named: Sequence[tuple[str, str, Sequence[int], bytes | bytearray | memoryview | np.ndarray]],
) -> tuple[Manifest, memoryview]:
    """`(name, dtype, shape, contiguous bytes)` of each tensor to a manifest and its body.

    Raises `WeightsError` like `Packer`, which takes one tensor at a time.
    """
    packer = Packer(version, transfer_id, [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape, _ in named])
    for name, _, _, data in named:
        packer.fill(name, data)
    return packer.finish(), packer.body


def check(manifest: Manifest, total_bytes: int, digest: bytes, max_bytes: int) -> None:
    """Raise `WeightsError` unless the manifest is sound in itself, within `max_bytes`, and what the sender signed.

    `total_bytes` and `digest` are the sender's own; they must be what the tensors say.
    """
    where = f"weights v{manifest.version}"
    seen: set[str] = set()
    offset = 0
    for tensor in manifest.tensors:
        if tensor.name in seen:
            raise WeightsError(f"{where}: tensor `{tensor.name}` is listed twice")
        seen.add(tensor.name)
        if tensor.nbytes != tensor_bytes(tensor.name, tensor.dtype, tensor.shape):
            raise WeightsError(
                f"{where}: tensor `{tensor.name}` lists {tensor.nbytes} bytes, "
                f"but {tensor.dtype} {list(tensor.shape)} has {tensor_bytes(tensor.name, tensor.dtype, tensor.shape)}"
            )
        if tensor.offset != offset:
            raise WeightsError(f"{where}: tensor `{tensor.name}` starts at {tensor.offset}, expected {offset}")
        if len(tensor.digest) != DIGEST_BYTES:
            raise WeightsError(f"{where}: tensor `{tensor.name}` has no digest of {DIGEST_BYTES} bytes")
        offset += tensor.nbytes
    if offset > max_bytes:
        raise WeightsError(f"{where}: {offset} bytes are more than weights.max_bytes ({max_bytes})")
    if total_bytes != offset:
        raise WeightsError(f"{where}: the sender says {total_bytes} bytes, its tensors have {offset}")
    if digest != manifest.digest:
        raise WeightsError(f"{where}: the manifest's digest does not match its tensors")


def _flat(data: bytes | bytearray | memoryview | np.ndarray) -> memoryview:
    """Bytes of a contiguous buffer of any item type, not copied."""
    view = memoryview(data)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
