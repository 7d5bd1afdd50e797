#!/usr/bin/env python3
"""What documents name in backticks is in the tree: members of classes, files, flags, identifiers. So are the files that
comments name, and what links point at."""

from __future__ import annotations

import functools
import itertools
import pathlib
import re
import sys

from tree import ROOT, files, report

CODE = {".h", ".c", ".cc", ".cu", ".cuh", ".py", ".pyi", ".proto", ".txt", ".cmake", ".in", ".json", ".yaml", ".toml", ""}
MADE = ("build/", "jobs/", "/")  # by programs, at run time


@functools.cache
def sources() -> dict[str, str]:
    return {path: (ROOT / path).read_text(errors="replace") for path in files()
            if pathlib.Path(path).suffix in CODE and not path.endswith(("tests/lint/selftest.py", ".hex"))
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
    return any(pattern.fullmatch(file) for file in files())


@functools.cache
def written(name: str) -> bool:
    """A file that programs make under this very name."""
    return any(f'"{name}"' in text for text in sources().values())


SUFFIX = r"\.(?:h|cc|cu|cuh|py|pyi|md|proto|json|yaml|hex|in|svg|xz)"
TOP = tuple(f"{folder}/" for folder in ("client", "common", "deploy", "kernels", "proto", "server", "tests"))


NAMED = re.compile(rf"(?<![\w/.\"<>}}-])(?:{'|'.join(TOP)})[\w./-]*\w{SUFFIX}\b(?!/)")


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


def slug(heading: str) -> str:
    """The anchor of a heading, as Git hosts make it."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(path: str, text: str) -> list[tuple[str, str]]:
    """Targets of relative links that are not there, each with why."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (ROOT / path).parent / file if file else ROOT / path
        if not there.exists():
            found.append((target, "there is no such file"))
        elif anchor and anchor not in {slug(line.lstrip("#")) for line in there.read_text().splitlines() if line.startswith("#")}:
            found.append((target, "there is no such heading"))
    return found


def line_of(text: str, name: str) -> int:
    return text[:max(text.find(name), 0)].count("\n") + 1


def main() -> int:
    found = []
    for path in files("*.md"):
        text = (ROOT / path).read_text()
        found += [f"{path}:{line_of(text, name)}: {name} is not in the tree: name what is, or take it out"
                  for name in dict.fromkeys(missing(text))]
        found += [f"{path}:{line_of(text, f'({target})')}: link to {target}: {why}" for target, why in broken_links(path, text)]
    for path, text in sources().items():
        found += [f"{path}:{line_of(text, name)}: {name} is not in the tree" for name in dict.fromkeys(NAMED.findall(text))
                  if not exists(name) and not written(name)]
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
