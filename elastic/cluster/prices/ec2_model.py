"""node_config against the service model of EC2 that botocore ships: misspelled keys, wrong kinds,
bad values. Offline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from elastic.config.clusters import ClusterSpec, Problem
from elastic.errors import alike, meant

# Keys of a node_config that are Ray's, and those of RunInstances that Ray itself fills in.
RAYS_KEYS = ("SubnetIds",)
FILLED_IN = ("MinCount", "MaxCount", "SubnetId")
KINDS = {
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "boolean": (bool,),
    "float": (int, float),
    "double": (int, float),
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
}
WORDS = {
    "structure": "keys and values",
    "map": "keys and values",
    "list": "a list",
    "string": "text",
    "boolean": "true or false",
}


def node_config_problems(spec: ClusterSpec) -> list[Problem]:
    found: list[Problem] = []
    for node_type in spec.node_types:
        config = {
            key: value for key, value in node_type.node_config.items() if key not in RAYS_KEYS
        }
        for key in FILLED_IN:
            if key in config:
                right = (
                    "SubnetIds: [...]"
                    if key == "SubnetId"
                    else "min_workers and max_workers of the node type"
                )
                what = "Ray sets it itself"
                found.append(node_type.problem("node_config", key, what=what, right=right))
        found += _wrong(config, _run_instances(), (*node_type.place, "node_config"))
    return found


@cache
def _run_instances() -> Any:
    import botocore.session

    model = botocore.session.get_session().get_service_model("ec2")
    return model.operation_model("RunInstances").input_shape


def _wrong(value: Any, shape: Any, place: tuple[str | int, ...]) -> Iterator[Problem]:
    kind = shape.type_name
    wanted = KINDS.get(kind)
    if wanted and (
        not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean")
    ):
        yield Problem(place, f"it is {value!r}", f"it must be {WORDS.get(kind, 'a number')}")
    elif kind == "structure":
        yield from _keys(value, shape, place)
    elif kind == "list":
        for n, item in enumerate(value):
            yield from _wrong(item, shape.member, (*place, n))
    elif (
        kind == "string" and shape.enum and value not in shape.enum and place[-1] != "InstanceType"
    ):
        yield Problem(place, f"it is '{value}'", f"it must be one of {', '.join(shape.enum)}")


def _keys(value: Mapping[str, Any], shape: Any, place: tuple[str | int, ...]) -> Iterator[Problem]:
    known = sorted(shape.members)
    for key, inner in value.items():
        if key in shape.members:
            yield from _wrong(inner, shape.members[key], (*place, str(key)))
            continue
        near = alike(str(key), known)
        right = meant(near) if near else f"keys are {', '.join(known[:12])} ..."
        yield Problem((*place, str(key)), "EC2 knows no such key", right)
