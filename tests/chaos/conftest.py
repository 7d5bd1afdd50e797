"""Fixtures, and the table at the end: what was killed where, how long it took, and whether the digest is the same."""

from __future__ import annotations

import json

import pytest

import cluster

_rows: list[dict] = []
_COLUMNS = (("run", "{}"), ("killed at", "{}"), ("kills", "{}"), ("serves again s", "{:.3f}"),
            ("rounds go on s", "{:.3f}"), ("rounds per s before", "{:.0f}"), ("rounds per s during", "{:.0f}"), ("rounds", "{}"), ("digest", "{}"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The digest of a run in which nothing is killed: undisturbed(setup)."""
    digests: dict[cluster.Setup, str] = {}

    def digest(setup: cluster.Setup) -> str:
        if setup not in digests:
            with cluster.Cluster(tmp_path_factory.mktemp("undisturbed"), setup) as job:
                job.start_servers()
                job.start_workers()
                digests[setup] = job.finish()
        return digests[setup]

    return digest


@pytest.fixture
def report():
    """Lets the job end, adds a row to the table and compares the digest with `expected`."""

    def add(job: cluster.Cluster, run: str, place: object, expected: str | None, *, killed_ns: int = 0,
            serving: float | None = None, kills: int = 1, **more: object) -> None:
        digest = job.finish()
        row = {"run": run, "killed at": str(place), "kills": kills, "rounds": job.setup.rounds, **more}
        if serving is not None:
            row["serves again s"] = serving
        if killed_ns:
            row["rounds go on s"] = job.rounds_after(killed_ns)
        row["digest"] = "all agree" if expected is None else "same" if digest == expected else "DIFFERS"
        _rows.append(row)
        assert expected in (None, digest)

    return add


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "ci: runs in continuous integration too, where the whole would take too long")


def pytest_terminal_summary(terminalreporter) -> None:
    if not _rows:
        return
    columns = [(name, form) for name, form in _COLUMNS if any(name in row for row in _rows)]
    lines = [[name for name, _ in columns]]
    for row in _rows:
        lines.append([form.format(row[name]) if name in row else "-" for name, form in columns])
    widths = [max(len(line[c]) for line in lines) for c in range(len(columns))]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
    results = cluster.ROOT / "build/tests"
    results.mkdir(parents=True, exist_ok=True)
    (results / "chaos.txt").write_text(text + "\n")
    (results / "chaos.json").write_text(json.dumps({"name": "chaos", "rows": _rows}, indent=1) + "\n")
    terminalreporter.write_line(text)
