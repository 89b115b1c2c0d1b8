"""An HTML page as its tests see it: is it well formed, what does it load, which numbers and texts
does it have?"""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input", "source"}
# attributes that make a browser load something
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"}


class PageSeen(HTMLParser):
    """`data`: (where: the tag of the table's part, class, exact value, text) of each <data>."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.data: list[tuple[str, str, float, str]] = []
        self._value: tuple[str, float] | None = None
        self.feed(page)
        self.close()
        self.wrong += [f"<{tag}> stays open" for tag in self.open]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if len(found) != len(attrs):
            self.wrong.append(f"<{tag}> has an attribute twice")
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in LOADING]
        self.wrong += [f"<{tag} {name}>" for name in found if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "data":
            self._value = (found.get("class") or "", float(found["value"] or "nan"))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.wrong.append(f"</{tag}> ends <{self.open[-1] if self.open else ''}>")
        else:
            self.open.pop()
        if tag == "data":
            self._value = None

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.texts.append(data)
        if self._value is not None:
            part = next((t for t in reversed(self.open) if t in ("tbody", "tfoot")), "")
            self.data.append((part, *self._value, data))
