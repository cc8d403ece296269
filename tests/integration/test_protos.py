"""The committed stubs are what `make proto` would write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = ("streamrl_pb2.py", "streamrl_pb2.pyi", "streamrl_pb2_grpc.py")


def test_stubs_are_fresh(tmp_path: Path) -> None:
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "services/pb=proto", *out, "proto/streamrl.proto"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    stale = [
        name
        for name in STUBS
        if (tmp_path / "services/pb" / name).read_bytes() != (ROOT / "services/pb" / name).read_bytes()
    ]
    assert not stale, f"{stale} differ from proto/streamrl.proto: run `make proto`"
