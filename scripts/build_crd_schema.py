"""Make training/podtune/cluster/lint/pytorchjob.schema.json, which `podtune lint` checks manifests against,
from the operator's CRD.

    python scripts/build_crd_schema.py kubeflow.org_pytorchjobs.yaml
    kubectl get crd pytorchjobs.kubeflow.org -o yaml | python scripts/build_crd_schema.py -

The CRD is Apache-2.0, of kubeflow/training-operator (manifests/base/crds). Kept are types, fields, required
fields and patterns; descriptions go. Unknown fields become errors (the API server drops them silently),
int-or-string becomes plain JSON Schema, and metadata, which the CRD leaves open, gets the fields of
ObjectMeta.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).resolve().parents[1] / "training/podtune/cluster/lint/pytorchjob.schema.json"
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECT_META = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        **{
            key: {"type": "string"}
            for key in (
                "name",
                "namespace",
                "uid",
                "resourceVersion",
                "creationTimestamp",
                "deletionTimestamp",
                "selfLink",
            )
        },
        **{key: {"type": "integer"} for key in ("generation", "deletionGracePeriodSeconds")},
        "generateName": {"type": "string"},
        "labels": STRINGS,
        "annotations": STRINGS,
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": {"type": "array", "items": {"type": "object"}},
        "managedFields": {"type": "array", "items": {"type": "object"}},
    },
}


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as plain JSON Schema that refuses unknown fields, without descriptions, defaults and
    formats.
    """
    if schema.get("x-kubernetes-int-or-string"):
        return {
            "type": ["integer", "string"],
            **({"pattern": schema["pattern"]} if "pattern" in schema else {}),
        }
    as_they_are = ("type", "required", "pattern", "enum", "x-kubernetes-list-map-keys")
    kept: dict[str, Any] = {key: schema[key] for key in as_they_are if key in schema}
    if "properties" in schema:
        kept["properties"] = {key: compact(value) for key, value in schema["properties"].items()}
        kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = compact(schema["additionalProperties"])
    if "items" in schema:
        kept["items"] = compact(schema["items"])
    return kept


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    """The check for a whole PyTorchJob document."""
    version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
    schema = compact(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"metadata": OBJECT_META, "status": {"type": "object"}}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return schema


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("crd", help="the CRD's YAML, or - for stdin")
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    text = sys.stdin.read() if arguments.crd == "-" else Path(arguments.crd).read_text(encoding="utf-8")
    schema = schema_of(yaml.safe_load(text))
    arguments.output.write_text(
        json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8"
    )
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
