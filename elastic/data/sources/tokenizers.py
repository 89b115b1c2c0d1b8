"""Text to token ids: by its bytes, by a Hugging Face `tokenizers` file, or not at all where a field
holds ids already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastic.errors import SpecError

FILE = "tokenizer.json"
# tried in this order
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
LARGEST_ID = (1 << 32) - 1


def tokenizer_of(name: str, end_token: str | None = None) -> Bytes | Ids | TokenizerFile:
    """`bytes`, `none` (the field holds ids), or the path of a tokenizer.json or of its folder.
    Raises SpecError."""
    if name in ("bytes", "none"):
        if end_token is not None:
            raise SpecError(
                f"end_token '{end_token}': tokenizer '{name}' has no texts for tokens; leave it out"
            )
        return Bytes() if name == "bytes" else Ids()
    return TokenizerFile(name, end_token)


class Bytes:
    """UTF-8 bytes, a byte 0 behind each document."""

    digest, vocab_size = "bytes", 256

    def encode(self, texts: Sequence[Any]) -> list[Any]:
        return [
            np.frombuffer(text.encode("utf-8", "surrogatepass") + b"\0", dtype=np.uint8)
            for text in texts
        ]

    def problem(self, text: Any) -> str:
        return _no_text(text)


class Ids:
    """The field holds a list of token ids, ends of documents included."""

    digest, vocab_size = "none", 1 << 32

    def encode(self, texts: Sequence[Any]) -> list[Any]:
        return list(texts)

    def problem(self, text: Any) -> str:
        good = isinstance(text, list) and all(
            isinstance(i, int) and 0 <= i <= LARGEST_ID for i in text
        )
        return (
            "" if good else f"tokenizer 'none' wants a list of token ids, it holds {_shown(text)}"
        )


class TokenizerFile:
    """A file of the `tokenizers` library. `end_token`: the text of the token behind each
    document."""

    def __init__(self, path: str | Path, end_token: str | None = None) -> None:
        file = Path(path).expanduser()
        file = file / FILE if file.is_dir() else file
        if not file.is_file():
            raise SpecError(
                f"tokenizer {path}: no such file; it must be 'bytes', 'none', or a {FILE} (or the "
                "folder of one)"
            )
        try:
            import tokenizers
        except ImportError as error:
            raise SpecError(
                f"tokenizer {path}: the package 'tokenizers' is not there; pip install tokenizers"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # a boundary: the library raises plain Exception
            raise SpecError(f"{file}: no file of the tokenizers library ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # ids may have holes
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.end_id = self._end(file, end_token or _named_end(file))
        self.digest = hashlib.sha256(file.read_bytes() + f"|{self.end_id}".encode()).hexdigest()

    def encode(self, texts: Sequence[Any]) -> list[Any]:
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[*encoding.ids, self.end_id] for encoding in found]

    def problem(self, text: Any) -> str:
        return _no_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _end(self, file: Path, token: str | None) -> int:
        for name in (token,) if token is not None else ENDS:
            found = self._tokenizer.token_to_id(name)
            if found is not None:
                return int(found)
        if token is not None:
            raise SpecError(
                f"{file}: it has no token '{token}' to end documents with; give end_token one "
                "that it has"
            )
        raise SpecError(
            f"{file}: which token ends a document is not known ({', '.join(ENDS)} are not there); "
            "give end_token"
        )


def _named_end(file: Path) -> str | None:
    """What the model's configuration beside the file says."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    try:
        found = json.loads(config.read_text()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise SpecError(f"{config}: not readable ({error})") from error
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _no_text(value: Any) -> str:
    if isinstance(value, str):
        return ""
    return (
        f"a text was wanted, it holds {_shown(value)}; name another field, or tokenizer: none "
        "where it holds ids"
    )


def _shown(value: Any) -> str:
    return f"a {type(value).__name__} ({str(value)[:40]})" if value is not None else "nothing"
