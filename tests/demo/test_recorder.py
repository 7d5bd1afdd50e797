"""The recorder of what the quickstart's workers push (tests/conformance/codec/recorded): it reads what they write."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

RECORDED = Path(__file__).resolve().parents[1] / "conformance/codec/recorded"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(RECORDED))
    import record

    return record


def records(file: bytes) -> tuple[int, list[tuple[int, int, bytes]]]:
    """Elements of all tensors; round, worker and index of each record."""
    numbers = struct.unpack_from("<I", file)[0]
    elements = sum(struct.unpack_from(f"<{numbers}I", file, 4))
    at = 4 + 4 * numbers
    left, found = struct.unpack_from("<I", file, at)[0], []
    at += 4
    for _ in range(left):
        round_, worker, size = struct.unpack_from("<III", file, at)
        at += 12 + size
        found.append((round_, worker, file[at - size : at]))
    assert at == len(file)
    return elements, found


@pytest.mark.parametrize("name", ["steps", "gradients"])
def test_records_what_is_pushed(record, tmp_path: Path, name: str) -> None:
    record.record(replace(record.RECORDINGS[name], rounds=(1, 2)), tmp_path / "now.bin")
    elements, found = records((tmp_path / "now.bin").read_bytes())
    committed, kept = records((RECORDED / f"{name}.bin").read_bytes())
    assert elements == committed, "the quickstart's model is another one: record again"
    assert [(round_, worker) for round_, worker, _ in found] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert {round_ for round_, _, _ in kept} == set(record.RECORDINGS[name].rounds)
    for _, _, index in found:
        positions = record.decode_index(3, index, 0, elements)
        assert positions == sorted(set(positions)) and positions[-1] < elements
        assert 0.03 < len(positions) / elements < 0.08  # the warm-up's density is 5 %


@pytest.mark.parametrize(("sent", "said"), [
    (b"GWIRETCP\x03\x00\x02\x00" + bytes(4), "a connection begins with 47 57 49 52 45 54 43 50 03"),
    (b"GWIRETCP\x02\x00\x02\x00" + bytes(4) + struct.pack("<BBHIIII", 9, 0, 0, 0, 0, 0, 0), "a packet of type 9"),
    (b"GWIRETCP\x02\x00\x02\x00" + bytes(4) + struct.pack("<BBHIIII", 4, 0, 0, 0, 64, 0, 0) + b"GWF2" + bytes(60),
     "a chunk begins with 47 57 46 32"),
    (b"GWIRETCP\x02\x00\x02\x00" + bytes(4) + struct.pack("<BBHIIII", 4, 0, 0, 0, 88, 0, 0)
     + struct.pack("<4sBB8xH48x", b"GWF1", 1, 1, 1) + struct.pack("<B23x", 19), "a segment of type 19"),
])
def test_bytes_of_another_format_are_said(record, sent: bytes, said: str) -> None:
    pushes = record.Pushes(None)
    with pytest.raises(ValueError, match=said):
        for byte in sent:
            pushes.take(bytes([byte]))
