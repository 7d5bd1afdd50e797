"""Files with a JSON object in each line, to which long studies add what they have finished. One process at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """None where there is no file. Takes away the end of a line whose writer was killed."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def append_line(path: Path, entry: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")
