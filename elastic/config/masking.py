"""Secrets in plain data and in texts: what is written to journal, checkpoints and reports has a
mark in their place.

A value is secret by the name it stands under (`hf_token`, `--wandb-api-key`, a password in a URI),
by its form (`hf_...`), or since it is, or was, that of a variable with such a name in this
process's environment, wherever it stands. Under `data` and `optimizer` names are the user's own, or
those of files and tokens of text: there only URIs and forms count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

STARS = "***"
LEAST_LETTERS = 8  # of a secret of the environment: shorter ones may be words
NAMES_SAY_NOTHING = ("data", "data.train", "optimizer", "settings of the optimizer")

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# a word of a name
_SECRET = re.compile(
    r"(pass(word|wd|phrase|code)|pwd|secret|credential|apikey|accesskey|signature|sig)s?"
)
_OF_TEXT = re.compile(  # before `token` or `key`: no secret
    "begin|bos|cls|column|data|end|eos|eot|field|group|image|index|input|label|mask|next|output|pad|primary|prompt|sep|sort|special"
    "|start|stop|target|text|unk"
)
# before the plural
_OF_ACCESS = re.compile(
    "access|api|auth|bearer|hf|huggingface|private|refresh|session|signing|ssh|wandb"
)
_MARKED = re.compile(r"\*\*\*[0-9a-f]*")
_ASSIGNED = re.compile(r"([-+]*([A-Za-z][\w.-]*)=)(.+)", re.DOTALL)
_URI = re.compile(r"([a-z][\w+.-]*://[^\s/:@]*:)([^\s/@]+)(?=@)", re.IGNORECASE)
_OPTION = re.compile(r"((?:(?<![\w-])--?|[?&])([A-Za-z][\w.-]*)[=\s'\",]+)(?!-)([^\s'\",&]+)")
_FORM = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{20,}|sk-(?:proj-|ant-)?\w{20,}|gh[a-z]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|xox[a-z]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
# a quick look at many short texts
_MAY_HOLD = re.compile(r"://|[?&]|(?<![\w-])-|hf_|sk-|gh[a-z]_|github_|glpat|xox|eyJ")

Mark = Callable[[str, str], str]  # name, secret -> what is written


def stars(name: str, secret: str) -> str:
    return STARS


def is_secret(name: str, value: str = "") -> bool:
    """Is what stands under this name, as a key, an option or a variable, a secret? Numbers are
    tokens of text, no keys."""
    words = [word.lower() for word in _WORD.findall(name)]
    if any(_SECRET.fullmatch(word) for word in words):
        return True
    if not words or _is_number(value):
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] in ("token", "key"):
        return not _OF_TEXT.fullmatch(before)
    return words[-1] in ("tokens", "keys") and _OF_ACCESS.fullmatch(before) is not None


def masked(value: Any, mark: Mark = stars, name: str = "", *, named: bool = True) -> Any:
    """Plain data with a mark for each secret; what is marked already stays. `name`: of the secret
    that it stands under; `named`: do names count?"""
    if isinstance(value, str):
        return (
            _marked(mark, name, value)
            if named and is_secret(name, value)
            else masked_text(value, mark)
        )
    if isinstance(value, dict):
        return {
            key: masked(
                item,
                mark,
                key if is_secret(str(key)) else name,
                named=named and key not in NAMES_SAY_NOTHING,
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if name or not all(isinstance(item, str) for item in value):
            return [masked(item, mark, name, named=named) for item in value]
        return list(_arguments(value, mark))
    return value


def masked_text(text: str, mark: Mark = stars) -> str:
    """A text of any kind: secrets of the environment, passwords in URIs, values of options,
    well-known forms."""
    of_environment = _ENVIRONMENT.secrets()
    if of_environment is not None:
        text = of_environment.sub(lambda m: _marked(mark, "", m[0]), text)
    if not _MAY_HOLD.search(text):
        return text
    text = _URI.sub(lambda m: m[1] + _marked(mark, "", m[2]), text)
    text = _OPTION.sub(
        lambda m: m[1] + _marked(mark, m[2], m[3]) if is_secret(m[2], m[3]) else m[0], text
    )
    return _FORM.sub(lambda m: _marked(mark, "", m[0]), text)


class _Environment:
    """The secrets in this process's, from here on: a program may read more into it at any time, and
    what leaves it still stands in clients and in texts of errors."""

    def __init__(self) -> None:
        self._seen: dict[bytes, bytes] = {}
        self._ever: set[str] = set()
        self._known: tuple[int, re.Pattern[str] | None] = (0, None)  # how many it knows
        self.secrets()

    def secrets(self) -> re.Pattern[str] | None:
        """No paths of files that hold them."""
        # within os.environ; by its own methods a look at a hundred variables takes 100 us, and each
        # text of a journal asks
        now: dict[bytes, bytes] = vars(os.environ)["_data"]
        if now != self._seen:
            self._ever |= _secrets_of(seen := dict(now))
            self._seen = seen
        n, pattern = self._known
        if n != len(self._ever):
            ever = sorted(self._ever, key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, ever)))
            self._known = len(ever), pattern
        return pattern


def _secrets_of(variables: Mapping[bytes, bytes]) -> set[str]:
    found = set()
    for variable, held in variables.items():
        name, value = os.fsdecode(variable), os.fsdecode(held)
        if len(value) >= LEAST_LETTERS and not value.startswith("/") and is_secret(name, value):
            found.add(value)
    return found


def _arguments(texts: Sequence[str], mark: Mark) -> Iterator[str]:
    """Of a command line: `--token x`, `--token=x`, `token=x`."""
    option = ""
    for text in texts:
        assigned = _ASSIGNED.fullmatch(text)
        if option and not text.startswith("--") and is_secret(option, text):
            yield _marked(mark, option, text)
        elif assigned and is_secret(assigned[2], assigned[3]):
            yield assigned[1] + _marked(mark, assigned[2], assigned[3])
        else:
            yield masked_text(text, mark)
        option = text.lstrip("-") if text.startswith("-") and not assigned else ""


def _marked(mark: Mark, name: str, secret: str) -> str:
    return secret if not secret or _MARKED.fullmatch(secret) else mark(name, secret)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_ENVIRONMENT = _Environment()  # looks at once: a secret may leave before the first text
