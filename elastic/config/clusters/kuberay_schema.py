"""A manifest against the schema of KubeRay's CRD: what Kubernetes would refuse, or drop unsaid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from elastic.catalog.schema import suggestion
from elastic.config.clusters.cluster_file import Place, Problem

FILE = "kuberay_schema.json"  # written by tests/support/cluster/condense_crd.py
API = "ray.io/v1"
SHOWN_MOST = 60  # characters of a value
KINDS: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "integer": (int,),
    "number": (int, float),
}  # fmt: skip
WORDS = {
    "object": "keys and values", "array": "a list", "string": "text (in quotes)",
    "boolean": "true or false", "integer": "a whole number", "number": "a number",
}  # fmt: skip


@cache
def _schema() -> Mapping[str, Any]:
    text = (files(__package__) / FILE).read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def version() -> str:
    """Of KubeRay, whose schema this is."""
    return str(_schema()["version"])


def problems_of_schema(manifest: Mapping[str, Any]) -> list[Problem]:
    """Of a RayCluster or RayJob, in the order of the schema."""
    found = list(_walk(_schema()["kinds"][manifest["kind"]], manifest, ()))
    if manifest.get("apiVersion") != API:
        what = f"'{_shown(manifest.get('apiVersion', ''))}' is not the API of KubeRay's operator"
        found.insert(0, Problem(("apiVersion",), what, f"apiVersion: {API}"))
    return found


def _walk(schema: Mapping[str, Any], value: Any, place: Place) -> Iterator[Problem]:
    schema = _schema()["parts"][schema["$ref"]] if "$ref" in schema else schema
    wrong = _wrong(schema, value)
    if wrong:
        what, right = wrong
        yield Problem(place, what, right)
    elif isinstance(value, dict):
        yield from _keys(schema, value, place)
    elif isinstance(value, list) and "items" in schema:
        for n, entry in enumerate(value):
            yield from _walk(schema["items"], entry, (*place, n))


def _keys(schema: Mapping[str, Any], value: Mapping[Any, Any], place: Place) -> Iterator[Problem]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    open_ended = others or not known or schema.get("x-kubernetes-preserve-unknown-fields")
    for key in value:
        if key not in known and not open_ended:
            what = (
                f"KubeRay {version()} knows no key '{_shown(key)}' here: it is refused, or ignored"
            )
            right = suggestion(str(key), known).removeprefix("; ") or "leave it out"
            yield Problem((*place, str(key)), what, right)
    for key in schema.get("required", ()):
        if value.get(key) is None:
            yield Problem((*place, key), "it is missing, and KubeRay needs it", f"{key}: ...")
    for key, entry in value.items():
        part = known.get(key, others)
        if isinstance(part, dict) and entry is not None:  # null = not said
            yield from _walk(part, entry, (*place, str(key)))


def _wrong(schema: Mapping[str, Any], value: Any) -> tuple[str, str] | None:
    """What is wrong with a value itself, and what would be right."""
    shown, kind = _shown(value), schema.get("type", "")
    if schema.get("x-kubernetes-int-or-string"):
        fits = isinstance(value, int | str) and not isinstance(value, bool)
        if not fits or not re.search(schema.get("pattern", ""), str(value)):
            return f"{shown} is no quantity", "a whole number, or text as in 500m or 16Gi"
        return None
    if kind in KINDS and (
        not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return f"it is {shown}", f"it must be {WORDS[kind]}"
    if "enum" in schema and value not in schema["enum"]:
        return f"it is {shown}", f"one of {', '.join(map(str, schema['enum']))}"
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    if kind in ("integer", "number") and not low <= value <= high:
        return f"it is {shown}", f"at least {low}" if value < low else f"at most {high}"
    return None


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_MOST else f"{text[:SHOWN_MOST]}..."
