"""Rules about text: links lead somewhere, the README stays short, nothing points off the clone."""

import posixpath
import re
from collections.abc import Iterator

from tests.tidy.tree import Breach, Files, Rule

README_LINES = 200

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)

# Words of how a change came about, and paths that exist on one machine only.
STRAY = re.compile(
    r"(?<![\w.=\"'])(?:sessions?|agents?)\b"
    r"|\.\./shared|(?<![\w.])/(?:work|root|home|opt|mnt|Users)/",
    re.IGNORECASE,
)


def slugs(text: str) -> set[str]:
    """The anchors that a rendered page gives its headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(FENCE.sub("", text))
    }


def dead_links(files: Files) -> Iterator[Breach]:
    for path, text in files.items():
        if not path.endswith(".md"):
            continue
        # Blank out fenced code, keeping the lines where they are.
        text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
        for line, content in enumerate(text.splitlines(), 1):
            for link in LINK.findall(content):
                if not is_alive(link, path, files):
                    yield Breach(path, line, link)


def is_alive(link: str, path: str, files: Files) -> bool:
    if re.match(r"https?://|mailto:", link):
        return True
    place, _, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), place)) if place else path
    if anchor:
        return anchor in slugs(files.get(target, ""))
    return any(name == target or name.startswith(f"{target}/") for name in files)


def long_readme(files: Files) -> Iterator[Breach]:
    lines = files["README.md"].count("\n")
    if lines >= README_LINES:
        yield Breach("README.md", lines, f"{lines} lines")


def stray_words(files: Files) -> Iterator[Breach]:
    for path, text in files.items():
        if path.startswith("tests/tidy/") or path == "tests/test_tidy.py":
            continue  # the words themselves
        for line, content in enumerate(text.splitlines(), 1):
            for found in STRAY.findall(content):
                yield Breach(path, line, f"{found!r} in: {content.strip()[:60]}")


RULES = (
    Rule("links in docs lead somewhere", "mend the path or the anchor", dead_links),
    Rule(
        f"the README has fewer than {README_LINES} lines",
        "move detail into docs/ and link it",
        long_readme,
    ),
    Rule(
        "text speaks of the project only",
        "say why a thing is so, not who made it or on which machine",
        stray_words,
    ),
)
