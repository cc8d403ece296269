"""Packing tensors into a body, and refusing manifests that are not sound."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services import wire
from services.errors import WeightsError
from services.pb import streamrl_pb2 as pb
from services.transport import chunks
from services.transport.base import Incoming, SourceBrokenError, WeightStore
from services.transport.manifest import verify
from services.transport.packing import Packer, TensorSpec, allocate, check, pack


def two_tensors():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = np.arange(5, dtype=np.int64)
    return pack(3, "t3", [("a", "float32", a.shape, a), ("b", "int64", b.shape, b.tobytes())])


def checked(manifest, max_bytes=1 << 20, total=None, digest=None):
    check(
        manifest,
        manifest.total_bytes if total is None else total,
        manifest.digest if digest is None else digest,
        max_bytes,
    )


def changed(manifest, index, **fields):
    tensors = list(manifest.tensors)
    tensors[index] = tensors[index]._replace(**fields)
    return dataclasses.replace(manifest, tensors=tuple(tensors))


def test_a_body_is_the_tensors_one_after_another_and_verifies():
    manifest, body = two_tensors()
    assert bytes(body) == np.arange(12, dtype=np.float32).tobytes() + np.arange(5, dtype=np.int64).tobytes()
    assert [(t.name, t.offset, t.nbytes) for t in manifest.tensors] == [("a", 0, 48), ("b", 48, 40)]
    verify(manifest, body)
    checked(manifest)
    message = wire.manifest_pb(manifest)
    assert wire.manifest(message) == manifest
    check(wire.manifest(message), message.total_bytes, message.digest, 1 << 20)


def test_tensors_can_be_filled_in_any_order_and_none_may_be_missing():
    packer = Packer(1, "t", [TensorSpec("a", "uint8", (4,)), TensorSpec("b", "bfloat16", (2, 2))])
    packer.fill("b", b"12345678")
    with pytest.raises(WeightsError, match="`a` was not filled"):
        packer.finish()
    packer.fill("a", bytearray(b"abcd"))
    manifest = packer.finish()
    assert manifest.total_bytes == 12
    verify(manifest, packer.body)
    assert bytes(packer.body) == b"abcd12345678"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [("c", b"", "not among"), ("a", b"abc", "has 3 bytes, uint8 \\[4\\] needs 4")],
)
def test_a_fill_that_does_not_belong_is_refused(name, data, says):
    packer = Packer(1, "t", [TensorSpec("a", "uint8", (4,))])
    with pytest.raises(WeightsError, match=says):
        packer.fill(name, data)


def test_filling_twice_naming_twice_and_unknown_dtypes_are_refused():
    packer = Packer(1, "t", [TensorSpec("a", "uint8", (1,))])
    packer.fill("a", b"x")
    with pytest.raises(WeightsError, match="`a` is filled twice"):
        packer.fill("a", b"x")
    with pytest.raises(WeightsError, match="`a` is given twice"):
        Packer(1, "t", [TensorSpec("a", "uint8", (1,)), TensorSpec("a", "uint8", (1,))])
    with pytest.raises(WeightsError, match="`a`: dtype `complex64`"):
        Packer(1, "t", [TensorSpec("a", "complex64", (1,))])


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000])
def test_buffers_are_aligned_and_writable(nbytes):
    buffer = allocate(nbytes)
    assert len(buffer) == nbytes
    assert not buffer.readonly
    assert np.frombuffer(buffer, np.uint8).ctypes.data % 64 == 0 or nbytes == 0


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda m: changed(m, 1, offset=44), "`b` starts at 44, expected 48"),
        (lambda m: changed(m, 0, shape=(3, 5)), r"`a` lists 48 bytes, but float32 \[3, 5\] has 60"),
        (lambda m: changed(m, 1, name="a"), "`a` is listed twice"),
        (lambda m: changed(m, 0, dtype="string"), "dtype `string`"),
        (lambda m: changed(m, 0, shape=(-3, -4)), "negative"),
        (lambda m: changed(m, 1, digest=b""), "`b` has no digest"),
    ],
)
def test_an_unsound_manifest_is_refused_by_name(broken, says):
    with pytest.raises(WeightsError, match=says):
        checked(broken(two_tensors()[0]))


def test_bounds_totals_and_the_senders_digest_are_held_against_the_manifest():
    manifest, _ = two_tensors()
    with pytest.raises(WeightsError, match=r"v3: 88 bytes are more than weights\.max_bytes"):
        checked(manifest, max_bytes=87)
    with pytest.raises(WeightsError, match="sender says 87"):
        checked(manifest, total=87)
    with pytest.raises(WeightsError, match="digest does not match"):
        checked(changed(manifest, 0, digest=b"0" * 16), digest=manifest.digest)


@given(st.integers(0, 2**62), st.binary(max_size=400))
def test_chunks_are_protobuf_on_the_wire(offset, data):
    ours = chunks.encode(chunks.Chunk(offset, memoryview(data)))
    assert ours == pb.WeightChunk(offset=offset, data=data).SerializeToString(deterministic=True)
    back = chunks.decode(ours)
    assert (back.offset, bytes(back.data)) == (offset, data)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_chunk_or_a_clear_error(message):
    try:
        chunk = chunks.decode(message)
    except WeightsError:
        return
    assert len(chunk.data) <= len(message)


def test_incoming_takes_only_what_follows():
    manifest, body = two_tensors()
    incoming = Incoming(manifest)
    incoming.write(0, body[:50], "peer:1")
    with pytest.raises(WeightsError, match=r"v3 from peer:1: at byte 50 of 88 \(`b`\).*duplicated"):
        incoming.write(0, body[:50], "peer:1")
    with pytest.raises(WeightsError, match="too early"):
        incoming.write(60, body[60:], "peer:1")
    with pytest.raises(SourceBrokenError, match="truncated"):
        incoming.require_complete("peer:1")
    with pytest.raises(WeightsError, match="oversize"):
        incoming.write(50, memoryview(bytes(39)), "peer:1")
    incoming.write(50, body[50:], "peer:1")
    incoming.require_complete("peer:1")
    assert incoming.body == body


def test_the_store_holds_one_version_and_says_which():
    store = WeightStore()
    manifest, body = two_tensors()
    with pytest.raises(WeightsError, match="nothing is held"):
        store.get("t3", 3)
    store.put(manifest, body)
    assert store.get("t3", 3).body.readonly
    with pytest.raises(WeightsError, match=r"v4 \(transfer t4\) are not held here; v3 \(transfer t3\) is"):
        store.get("t4", 4)
    with pytest.raises(WeightsError, match="body has 10 bytes"):
        store.put(manifest, body[:10])
