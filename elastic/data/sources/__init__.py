"""Where samples are read from: text, JSON lines, Parquet, tokenized rows, locally or through the
node's block cache."""

from typing import Any

__all__ = ["LEFT_OUT", "TextFolder", "python_stdlib_folder"]


def __getattr__(name: str) -> Any:
    """What programs take from here is imported when it is first asked for: its module needs others
    of this package."""
    if name in __all__:
        from elastic.data.sources import text_folder

        return getattr(text_folder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
