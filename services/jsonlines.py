"""JSON-lines files that somebody may still be writing: whole lines only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonLines:
    """Reads what was appended to `path` since the last read; a file that is not there yet is empty."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self.skipped = 0
        """Whole lines that are not JSON objects (a writer was cut off inside one)."""

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                self._offset = min(self._offset, file.seek(0, 2))  # a resumed run cuts off what it does again
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        rows = []
        for line in data[:whole].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif line.strip():
                self.skipped += 1
        return rows
