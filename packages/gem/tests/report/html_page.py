"""Reads a page as a test wants to ask it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


class Page(HTMLParser):
    """What a test wants to know of a page. Raises where tags are not closed in their order."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.style = ""
        self.words: list[str] = []
        self.html = text
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open  # HTML has no such tags
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def table(self, *headers: str) -> list[list[str]]:
        """The rows of the first table that begins with some headers, with tidy cells."""
        for rows in self.tables:
            tidy = [[" ".join(cell.split()) for cell in row] for row in rows]
            if tidy and tidy[0][: len(headers)] == list(headers):
                return tidy[1:]
        raise AssertionError(f"no table {headers}")
