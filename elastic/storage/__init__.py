"""Storage of a run: keys -> bytes under one URI: a local folder, a shared file system,
`s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.

Which of them a URI means stands in this file.
"""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from elastic.errors import SpecError
from elastic.storage.interface import TEMPORARY, Sizes, Storage
from elastic.storage.local import LocalStorage

__all__ = ["TEMPORARY", "LocalStorage", "Sizes", "Storage", "open_storage"]


EXTRAS = {"gs": "gcs", "az": "azure"}  # optional dependencies that bring the client


def open_storage(uri: str | os.PathLike[str]) -> Storage:
    """Storage under a local path, a file://, s3://, gs:// or az:// URI; nothing is read or made.
    Raises SpecError."""
    text = os.fspath(uri)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "s3":
        from elastic.storage.s3 import S3Storage  # boto3 takes a third of a second to import

        return S3Storage(text)
    if scheme in EXTRAS:
        return _cloud(scheme, text)
    if scheme not in ("", "file"):
        raise SpecError(
            f"{text}: '{scheme}://' is not known; use a folder that all nodes share, or "
            "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    path = unquote(urlsplit(text).path) if scheme else os.path.expanduser(text)
    if not path:
        raise SpecError(f"storage '{text}' names no folder")
    return LocalStorage(path)


def _cloud(scheme: str, uri: str) -> Storage:
    try:
        from elastic.storage.cloud import AzureStorage, GoogleStorage
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise SpecError(
            f"{uri}: the client of {scheme}:// is not installed; pip install "
            f"'elastic-ray[{EXTRAS[scheme]}]', on every node"
        ) from error
    return GoogleStorage(uri) if scheme == "gs" else AzureStorage(uri)
