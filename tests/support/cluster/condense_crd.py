"""Writes elastic/config/clusters/kuberay_schema.json: what is checked of KubeRay's own CRDs, each
part once.

python tests/support/cluster/condense_crd.py KUBERAY/helm-chart/kuberay-operator/crds 1.7.0
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
TARGET = ROOT / "elastic" / "config" / "clusters" / "kuberay_schema.json"
FILES = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}
API = "v1"
KEPT = (
    "type", "required", "enum", "minimum", "maximum", "pattern", "properties", "items",
    "additionalProperties", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
)  # fmt: skip
LEAST = 60  # characters of a part that is worth a name


def kept(schema: Any) -> Any:
    """Without descriptions, rules in CEL and defaults: a key that has one need not be there."""
    if not isinstance(schema, dict):
        return schema
    found = {key: schema[key] for key in KEPT if key in schema}
    if "required" in found:
        parts = schema.get("properties", {})
        found["required"] = [
            key for key in found["required"] if "default" not in parts.get(key, {})
        ]
    if "properties" in found:
        found["properties"] = {name: kept(part) for name, part in found["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = kept(found[key])
    return found


def inner(schema: Any) -> list[Any]:
    parts = [*schema.get("properties", {}).values()]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return [part for part in parts if isinstance(part, dict)]


def counted(schema: Any, found: Counter[str]) -> None:
    found[json.dumps(schema, sort_keys=True)] += 1
    for part in inner(schema):
        counted(part, found)


def named(schema: Any, often: Counter[str], parts: dict[str, Any], names: dict[str, str]) -> Any:
    """With `$ref` to `parts` in place of what stands there more than once."""
    if not isinstance(schema, dict):
        return schema
    text = json.dumps(schema, sort_keys=True)
    if text not in names:
        made = dict(schema)
        if "properties" in made:
            pairs = made["properties"].items()
            made["properties"] = {key: named(part, often, parts, names) for key, part in pairs}
        for key in ("items", "additionalProperties"):
            if key in made:
                made[key] = named(made[key], often, parts, names)
        if often[text] == 1 or len(text) < LEAST:
            return made
        names[text] = str(len(parts))
        parts[names[text]] = made
    return {"$ref": names[text]}


def condensed(folder: Path, version: str) -> str:
    kinds = {}
    for kind, file in FILES.items():
        crd = yaml.safe_load((folder / file).read_text())
        (served,) = (found for found in crd["spec"]["versions"] if found["name"] == API)
        whole = kept(served["schema"]["openAPIV3Schema"])
        del whole["properties"]["status"]  # what the operator writes
        kinds[kind] = whole
    often: Counter[str] = Counter()
    for schema in kinds.values():
        counted(schema, often)
    parts: dict[str, Any] = {}
    names: dict[str, str] = {}
    tops = {kind: named(schema, often, parts, names) for kind, schema in kinds.items()}
    source = json.dumps(f"ray-project/kuberay v{version} (Apache-2.0), its CRDs, condensed")
    rows = [f' "{name}": {json.dumps(part)}' for name, part in parts.items()]
    heads = [f' "{kind}": {json.dumps(part)}' for kind, part in tops.items()]
    return (
        f'{{"version": {json.dumps(version)}, "from": {source},\n"kinds": {{\n'
        + ",\n".join(heads)
        + '\n},\n"parts": {\n'
        + ",\n".join(rows)
        + "\n}}\n"
    )


if __name__ == "__main__":
    TARGET.write_text(condensed(Path(sys.argv[1]), sys.argv[2]))
