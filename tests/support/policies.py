"""What a policy of IAM allows, by the part of its rules that the files of deploy/iam use; anything
else raises."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any


def allows(
    statements: list[dict[str, Any]],
    action: str,
    resource: str,
    keys: Mapping[str, str] | None = None,
) -> bool:
    """`keys`: of the request, as `aws:ResourceTag/name`. Nothing is allowed that no statement does;
    a Deny would win."""
    found = [entry for entry in statements if _fits(entry, action, resource, keys or {})]
    return any(entry["Effect"] == "Allow" for entry in found) and all(
        entry["Effect"] == "Allow" for entry in found
    )


def _fits(entry: Mapping[str, Any], action: str, resource: str, keys: Mapping[str, str]) -> bool:
    unknown = entry.keys() - {"Sid", "Effect", "Action", "Resource", "Condition"}
    if unknown:
        raise NotImplementedError(f"{sorted(unknown)}")
    return (
        any(fnmatchcase(action.lower(), one.lower()) for one in _listed(entry["Action"]))
        and any(fnmatchcase(resource, one) for one in _listed(entry["Resource"]))
        and all(_holds(kind, asked, keys) for kind, asked in entry.get("Condition", {}).items())
    )


def _holds(kind: str, asked: Mapping[str, Any], keys: Mapping[str, str]) -> bool:
    """All keys must fit, each any of its values; a key that the request has not does not fit."""
    equal = {"StringEquals": str.__eq__, "StringLike": fnmatchcase}[kind]
    return all(
        name in keys and any(equal(keys[name], one) for one in _listed(values))
        for name, values in asked.items()
    )


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
