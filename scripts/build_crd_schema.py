"""Make the schemas that `podtune lint` checks manifests against from the CRDs of the training operator and of
Kubeflow Trainer.

    python scripts/build_crd_schema.py pytorchjob-1.9=kubeflow.org_pytorchjobs.yaml
    python scripts/build_crd_schema.py trainjob-2.0=TRAINJOBS.yaml runtime-2.0=RUNTIMES.yaml ...

Each argument is NAME-VERSION=FILE, or - for stdin. PyTorchJob goes to pytorchjob.schema.json, the kinds of
Trainer, all versions together, to trainer.schema.json, both in training/podtune/cluster/lint.

The CRDs are Apache-2.0: kubeflow/training-operator (manifests/base/crds) and kubeflow/trainer (the same
folder of each release). Kept are types, fields, required fields, bounds, values and patterns; descriptions
go. Unknown fields become errors, int-or-string becomes plain JSON Schema, and metadata, which a CRD leaves
open, gets the fields of ObjectMeta. A part that occurs more than once is stored once: ``nodes`` holds every
part, and a part names its children by their number in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[1] / "training/podtune/cluster/lint"
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECTS = {"type": "array", "items": {"type": "object"}}
TEXTS = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "selfLink")
OBJECT_META = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        **{key: {"type": "string"} for key in (*TEXTS, "generateName")},
        **{key: {"type": "integer"} for key in ("generation", "deletionGracePeriodSeconds")},
        "labels": STRINGS,
        "annotations": STRINGS,
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": OBJECTS,
        "managedFields": OBJECTS,
    },
}
AS_THEY_ARE = (
    *("type", "required", "pattern", "enum", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "x-kubernetes-list-map-keys"),
)


def compact(schema: Json) -> Json:
    """``schema`` as plain JSON Schema that refuses unknown fields, without descriptions, defaults and
    formats."""
    if schema.get("x-kubernetes-int-or-string"):
        pattern = {"pattern": schema["pattern"]} if "pattern" in schema else {}
        return {"type": ["integer", "string"], **pattern}
    kept: Json = {key: schema[key] for key in AS_THEY_ARE if key in schema}
    if "properties" in schema:
        kept["properties"] = {key: compact(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = compact(schema["additionalProperties"])
    if "items" in schema:
        kept["items"] = compact(schema["items"])
    return kept


def schema_of(crd: Json) -> Json:
    """The check for a whole document of the CRD's kind."""
    schema = compact(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"metadata": OBJECT_META, "status": {"type": "object"}}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return schema


class Store:
    """The parts of all schemas, each once; a part comes after its children."""

    def __init__(self) -> None:
        self.nodes: list[Json] = []
        self.numbers: dict[str, int] = {}

    def number(self, schema: Json) -> int:
        """The place of ``schema`` in ``nodes``."""
        node = dict(schema)
        if "properties" in node:
            node["properties"] = {key: self.number(value) for key, value in node["properties"].items()}
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                node[key] = self.number(node[key])
        text = json.dumps(node, sort_keys=True)
        if text not in self.numbers:
            self.numbers[text] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[text]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("crds", nargs="+", metavar="NAME-VERSION=FILE")
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    stores: dict[str, tuple[Store, dict[str, int]]] = {}
    for argument in arguments.crds:
        name, _, file = argument.partition("=")
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        target = "pytorchjob" if name.startswith("pytorchjob") else "trainer"
        store, roots = stores.setdefault(target, (Store(), {}))
        roots[name] = store.number(schema_of(yaml.safe_load(text)))
    for target, (store, roots) in stores.items():
        path = arguments.output / f"{target}.schema.json"
        content = {"roots": roots, "nodes": store.nodes}
        path.write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
