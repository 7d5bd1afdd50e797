"""The README's examples are the files that the tests run."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("example", ["client/examples/quick.py", "client/examples/quick.cc"])
def test_readme_shows_the_example_as_it_is(example: str) -> None:
    assert (ROOT / example).read_text().rstrip() in (ROOT / "README.md").read_text()
