"""Write a software bill of materials (CycloneDX 1.6, JSON) of requirements.txt, or of what an image has
installed.

    python scripts/sbom.py > podtune.cdx.json
    docker run --rm IMAGE python -c 'from importlib.metadata import distributions as all
    for one in all(): print(f"{one.name}=={one.version}")' | python scripts/sbom.py - > image.cdx.json
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(?:\s*;\s*([^\\]+?))?\s*\\?$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def bill(requirements: str, version: str) -> dict[str, Any]:
    """The bill of the packages that ``requirements`` pins, with the hashes that it names. The same text gives
    the same bill.
    """
    components: list[dict[str, Any]] = []
    for line in requirements.splitlines():
        if pinned := _PINNED.match(line):
            name, number, marker = pinned.groups()
            name = re.sub(r"[-_.]+", "-", name).lower()
            locator = f"pkg:pypi/{name}@{number}"
            components.append(
                {"type": "library", "bom-ref": locator, "name": name, "version": number, "purl": locator}
                | ({"properties": [{"name": "podtune:marker", "value": marker}]} if marker else {})
            )
        elif components and (digest := _HASH.search(line)):
            files = components[-1].setdefault("externalReferences", [])
            files.append(
                {
                    "type": "distribution",
                    "url": components[-1]["purl"],
                    "hashes": [{"alg": "SHA-256", "content": digest[1]}],
                }
            )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, version + requirements)}",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "podtune", "version": version}},
        "components": components,
    }


if __name__ == "__main__":
    source = sys.stdin if sys.argv[1:] == ["-"] else (ROOT / "requirements.txt").open(encoding="utf-8")
    found = re.search(
        r'__version__ = "(.+)"', (ROOT / "training/podtune/__init__.py").read_text(encoding="utf-8")
    )
    assert found, "podtune/__init__.py names no version"
    print(json.dumps(bill(source.read(), found[1]), indent=1))
