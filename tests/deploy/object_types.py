"""What is wrong with an object of Kubernetes, by its type: unknown fields, wrong types, missing values.

Kubernetes' own types are those of its Python client. Types of other projects are their CustomResourceDefinitions where
the test bed has them (`make recipes` fetches them), and in `shapes/` the fields that we use of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes import client

from tests.deploy.bed import tools

SHAPES = Path(__file__).parent / "shapes"
DEFINITIONS = {
    "leaderworkerset.x-k8s.io": tools.LEADER_WORKER_SET,
    "serving.kserve.io": tools.LLM_INFERENCE_SERVICE,
}
"""Groups of types whose definitions the test bed has, and its names of them."""
OWN_READING = {
    "keda.sh": "keda",
    "nvidia.com": "dynamo",
    "scheduling.volcano.sh": "volcano",
    "scheduling.x-k8s.io": "coscheduling",
    "": "production-stack",
}
"""Groups of types without one, and the file in `shapes/`; an object without a group is a chart's values."""
_AMOUNTS = ("limits", "requests")


def group_of(thing: Any) -> str:
    """The API group of an object; "" of values, which have none, "v1" of Kubernetes' first one."""
    version = str(thing.get("apiVersion", ""))
    return version.rpartition("/")[0] or version


def definition(thing: Any) -> Path | None:
    """Where the definition of the object's type is, or would be; None: it needs none."""
    name = DEFINITIONS.get(group_of(thing))
    if name is None:
        return None
    module = next(module for module in tools.MODULES.values() if f"{name}.crd.yaml" in module.files)
    return module.folder() / f"{name}.crd.yaml"


def faults_of(thing: Any) -> list[str]:
    """What the API server, or helm, would refuse the object for. The definition of its type must be there."""
    group, path = group_of(thing), definition(thing)
    if path is not None:
        return _by_schema(thing, _of_definition(path, thing["apiVersion"].rpartition("/")[2], thing.get("kind", "")))
    if group in OWN_READING:
        return _by_schema(thing, _of_shape(OWN_READING[group]))
    return list(model_faults(thing, f"{thing['apiVersion'].rpartition('/')[2].capitalize()}{thing.get('kind', '')}"))


def model_faults(thing: Any, model: str) -> Iterator[str]:
    """The same by a type of Kubernetes' Python client, like `V1Pod`."""
    kind = getattr(client, model, None)
    if kind is None:
        yield f"expected a type that Kubernetes has, got {model}"
        return
    try:
        kind.model_validate(_amounts(thing), strict=True, by_alias=True, by_name=False)
    except ValueError as error:
        yield str(error)


def _amounts(thing: Any, name: str = "") -> Any:
    """The object with amounts of resources as texts: the API server takes numbers, too, the client does not."""
    if isinstance(thing, dict):
        is_amount = name in _AMOUNTS
        return {key: str(one) if is_amount and type(one) is int else _amounts(one, key) for key, one in thing.items()}
    return [_amounts(one) for one in thing] if isinstance(thing, list) else thing


def _of_model(_: Any, model: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """The keyword x-model: a type of Kubernetes inside a schema."""
    yield from (jsonschema.ValidationError(fault) for fault in model_faults(value, model))


_Validator = jsonschema.validators.extend(jsonschema.Draft7Validator, {"x-model": _of_model})


def _by_schema(thing: Any, validator: Any) -> list[str]:
    return [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(thing)]


@cache
def _of_shape(name: str) -> Any:
    return _Validator(strict(yaml.safe_load((SHAPES / f"{name}.yaml").read_text())["schema"]))


@cache
def _of_definition(path: Path, version: str, kind: str) -> Any:
    """By the version of a CustomResourceDefinition that the object names."""
    spec = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
    served = {one["name"]: one["schema"]["openAPIV3Schema"] for one in spec["versions"] if one["served"]}
    if kind != spec["names"]["kind"] or version not in served:
        return _Validator({"const": f"a {spec['names']['kind']} of {', '.join(served)}"})
    return _Validator(strict(served[version]))


def strict(schema: Any, name: str = "") -> Any:
    """The schema with what the API server does beside it: unknown fields are refused and defaults filled in."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if name == "metadata" and "properties" not in schema:
        return {"x-model": "V1ObjectMeta"}
    parts = {key: strict(one) for key, one in schema.items() if key not in ("properties", "required")}
    fields = schema.get("properties")
    if fields is not None:
        parts["properties"] = {key: strict(one, key) for key, one in fields.items()}
        parts["required"] = [key for key in schema.get("required", ()) if "default" not in fields.get(key, {})]
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            parts.setdefault("additionalProperties", False)
    return parts
