"""What READMEs and proto/*.md name in backticks is in the tree: members of classes, files, flags, identifiers."""

import functools
import itertools
import pathlib
import re
import subprocess

import pytest
from conftest import ROOT, server_binary

CODE = {".h", ".cc", ".cu", ".cuh", ".py", ".pyi", ".proto", ".txt", ".cmake", ".in", ".json", ".yaml", ".toml", ""}
MADE = ("build/", "jobs/", "/")  # by programs, at run time


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                          text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for path in done.stdout.splitlines() if (ROOT / path).exists()]


FILES = functools.cache(tracked)


@functools.cache
def sources() -> dict[str, str]:
    return {path: (ROOT / path).read_text(errors="replace") for path in FILES()
            if pathlib.Path(path).suffix in CODE and not path.endswith(("tests/python/test_docs.py", ".hex"))
            and not path.startswith("tests/fuzz/corpus")}


@functools.cache
def words() -> set[str]:
    return set(itertools.chain.from_iterable(re.findall(r"\w+", text) for text in sources().values()))


@functools.cache
def flags() -> set[str]:
    return set(itertools.chain.from_iterable(re.findall(r"--[a-z][a-z0-9-]*", text) for text in sources().values()))


def body_of(text: str, begin: int) -> str:
    """From the first brace after `begin` to the one that closes it; of a declaration alone, nothing."""
    semicolon, at = text.find(";", begin), text.find("{", begin)
    if at < 0 or 0 <= semicolon < at:
        return ""
    depth = 0
    for match in re.finditer(r"[{}]", text[at:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[at:at + match.end()]
    return text[at:]


@functools.cache
def member(owner: str, name: str) -> bool:
    """Whether a class, enum, namespace or message `owner` has something called `name`."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    kind = re.compile(rf"\b(?:class|struct|enum|enum class|namespace|message|service)(?: \w+)* (?:[\w:]+::)?{re.escape(owner)}\b")
    for text in sources().values():
        if owner not in text:
            continue
        if re.search(rf"\b{re.escape(owner)}(::|\.){re.escape(name)}\b", text):
            return True
        if any(word.search(body_of(text, match.end())) for match in kind.finditer(text)):
            return True
    return False


def expanded(path: str) -> list[str]:
    """`a/b.{h,cc}` as two."""
    match = re.search(r"\{([^{}]*)\}", path)
    return [path] if not match else [path[:match.start()] + part + path[match.end():] for part in match[1].split(",")]


@functools.cache
def exists(path: str) -> bool:
    pattern = re.compile("(?:.*/)?" + re.escape(path.rstrip("/")).replace(r"\*", "[^/]*") + "(?:/.*)?")
    return any(pattern.fullmatch(file) for file in FILES())


@functools.cache
def written(name: str) -> bool:
    """A file that programs make under this very name."""
    return any(f'"{name}"' in text for text in sources().values())


SUFFIX = r"\.(?:h|cc|cu|cuh|py|pyi|md|proto|json|yaml|hex|in|svg|xz)"
TOP = tuple(f"{folder}/" for folder in ("client", "common", "deploy", "kernels", "proto", "server", "tests"))


def missing(text: str) -> list[str]:
    """What a document names and the tree does not have."""
    found = []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
        if flag not in flags():
            found.append(flag)
    for code in re.findall(r"`([^`\n]+)`", prose):
        for part in code.split():
            part = part.strip(",;:()")
            part = part.removeprefix("../")
            if not re.fullmatch(r"\w[\w*./-]*(?:\{[\w.,-]+\}[\w.]*)?/?", part) or part.startswith(MADE):
                continue
            if re.search(SUFFIX + "$", part) or "{" in part or part.startswith(TOP):
                found += [path for path in expanded(part) if not exists(path) and not written(path)]
        if match := re.fullmatch(r"(?:\w+::)*(\w+)(?:::|\.)(\w+)(?:\(.*\))?", code):
            if match[1][0].isupper() and not match[1].isupper() and not member(match[1], match[2]):
                found.append(code)
        elif match := re.fullmatch(r"(\w+)(?:\(\))?", code):
            named = re.search(r"[a-z]+[A-Z]|[A-Z][a-z]+[A-Z]|\w_\w", match[1])
            if named and match[1] not in words():
                found.append(code)
    return found


def test_what_documents_name_is_there():
    documents = [path for path in FILES() if path.endswith(".md") and not path.startswith("build/")]
    assert "README.md" in documents and "proto/WIRE.md" in documents
    wrong = [f"{path}: {name}" for path in documents for name in dict.fromkeys(missing((ROOT / path).read_text()))]
    assert not wrong, "these names are not in the tree:\n" + "\n".join(wrong)


@pytest.mark.parametrize("text, names", [
    ("`Codec::NewEncoder` and `Codec::NewNothing`", ["Codec::NewNothing"]),
    ("`DeferredNothing` is no `PositionCounters`", ["DeferredNothing"]),
    ("`common/codec/codec.{h,xx}`, `draw.h`, `tests/nothing/`", ["common/codec/codec.xx", "tests/nothing/"]),
    ("```\ngradwire-server --data-dir=/var --such-a-flag\n```", ["--such-a-flag"]),
])
def test_names_that_are_not_there_are_found(text, names):
    assert missing(text) == names


def test_what_goes_with_what_is_the_table():
    page = subprocess.run([server_binary().parent / "gradwire", "features"], capture_output=True, text=True, check=True).stdout
    assert (ROOT / "common/job/COMPATIBILITY.md").read_text() == page, \
        "make it anew: gradwire features > common/job/COMPATIBILITY.md"
