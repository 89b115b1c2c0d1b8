"""load_cluster(): a cluster file -> ClusterSpec. Reads YAML and the catalog, asks nobody."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from elastic.catalog.bounded_yaml import YAML_LOADER, read_yaml
from elastic.config.clusters import kuberay, ray_launcher
from elastic.config.clusters.cluster_file import ClusterSpec, Place, Problem
from elastic.errors import SpecError

KIND = re.compile(rf"^kind: *['\"]?({'|'.join(kuberay.KINDS)})", re.MULTILINE)


def load_cluster(file: str | Path) -> ClusterSpec:
    """Raises SpecError with the first thing that keeps its pools from being known; `problems_of`
    finds what else is wrong."""
    spec, problems = read_cluster(file)
    for problem in problems:
        if not problem.warning:
            raise SpecError(problem.line(spec.file, spec.lines))
    if not spec.pools:
        raise SpecError(
            f"{spec.file}: it has no pool: no worker node type with max_workers of at least 1"
        )
    return spec


def read_cluster(file: str | Path) -> tuple[ClusterSpec, list[Problem]]:
    """What can be read of it, and what keeps the rest from being read. Raises SpecError where it is
    no cluster file at all."""
    path = Path(file)
    if not path.is_file():
        raise SpecError(
            f"{file}: {'a folder' if path.is_dir() else 'no such file'}; a cluster file is what "
            "`ray up` takes (cluster_configs/ has some)"
        )
    text = text_of(path, str(file))
    documents = kuberay.documents(text, str(file)) if KIND.search(text) else []
    if documents:
        spec, problems = kuberay.spec_of(str(file), documents)
    else:
        data = read_yaml(path, str(file))
        if not isinstance(data, dict) or "provider" not in data:
            raise SpecError(
                f"{file}: no cluster file: it has no key 'provider', as those that `ray up` "
                "takes, and no RayCluster"
            )
        spec, problems = ray_launcher.spec_of(str(file), data)
    return dataclasses.replace(spec, lines=lines_of(text)), problems


def text_of(path: Path, shown: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{shown}: cannot be read: {error}") from error


def lines_of(text: str) -> Mapping[Place, int]:
    """Where each key stands: path -> line, from 1. Of several documents each counts."""
    found: dict[Place, int] = {}
    for document in yaml.compose_all(text, Loader=YAML_LOADER):
        for place, line in _walk(document, ()):
            found.setdefault(place, line)
    return found


def _walk(node: Any, place: Place) -> Iterator[tuple[Place, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*place, str(key.value))
            yield inner, key.start_mark.line + 1
            yield from _walk(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for n, value in enumerate(node.value):
            yield (*place, n), value.start_mark.line + 1
            yield from _walk(value, (*place, n))
