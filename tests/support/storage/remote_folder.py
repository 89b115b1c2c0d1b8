"""A folder that is treated like object storage."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from elastic.storage import LocalStorage


class Remote(LocalStorage):
    """`broken`: what its next writes raise, before or `after` they are done."""

    remote: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broken: Exception | None = None
        self.after = False

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        done = super().put(key, data, if_absent) if self.broken is None or self.after else False
        if self.broken is not None:
            raise self.broken
        return done
