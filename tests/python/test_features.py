"""The page of what goes with what is the table that refusals are made from."""

import subprocess

from conftest import ROOT, server_binary


def test_the_page_is_the_table():
    page = subprocess.run([server_binary().parent / "gradwire", "features"], capture_output=True, text=True, check=True).stdout
    assert (ROOT / "common/job/COMPATIBILITY.md").read_text() == page, \
        "make it anew: gradwire features > common/job/COMPATIBILITY.md"
