"""The quickstart's training loop, a few steps, end to end: real servers, real workers, the real report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_trains_both_ways_and_reports(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "client/examples/gpt/quickstart.py"),
            *("--fast", "--steps", "16", "--runs", "dense", "tagc", "--out", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["runs"]) == {"dense", "tagc"}
    for run in report["runs"].values():
        assert run["steps"] == 16 and run["workers"] == 2 and run["shards"] == 2
        assert run["curves"]["1"][-1]["val_loss"] < 5.0  # untrained: ln 256 = 5.55
    dense, tagc = report["runs"]["dense"], report["runs"]["tagc"]
    assert tagc["push_bytes_per_step"] < dense["push_bytes_per_step"] / 10
    assert (tmp_path / "report.html").stat().st_size > 20_000
