"""The examples of lint's rules as whole manifests, and the command as a function."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from podtune.cli import load
from podtune.cluster.lint.explain import examples

Json = dict[str, Any]


def main(words: list[str]) -> int:
    """The exit code of ``podtune lint`` with these words."""
    return int(load("lint").main(words, standalone_mode=False) or 0)


def example(code: str, which: str) -> str:
    """The whole manifest of a rule's bad or good example, as YAML."""
    entry = examples()[code]
    if isinstance(entry[which], str):
        return str(entry[which])
    changed = entry.get("changes") or {"PT5": "trainjob", "PT6": "job"}.get(code[:3], "base")
    base: Json = yaml.safe_load(examples()[changed])
    if "with" not in entry:
        return _dump([merged(base, entry[which])])
    others = yaml.safe_load(examples()["runtime"]) if entry["with"] == "runtime" else entry["with"]
    return _dump([merged(others, entry[which]), merged(base, entry.get("job", {}))])


def merged(base: Any, change: Any) -> Any:
    """``base`` with ``change``: mappings by key, lists of named things by name; null removes."""
    if isinstance(base, dict) and isinstance(change, dict):
        result = copy.deepcopy(base)
        for key, value in change.items():
            if value is None:
                result.pop(key, None)
            elif key == "$rename":
                result["name"] = value
            else:
                result[key] = merged(result.get(key), value)
        return result
    if (
        isinstance(base, list)
        and isinstance(change, list)
        and all(isinstance(item, dict) and "name" in item for item in (*base, *change))
    ):
        if all("mountPath" in item for item in (*base, *change)):
            return [*copy.deepcopy(base), *change]
        changes = {item["name"]: item for item in change}
        kept = [merged(item, changes.pop(item["name"], {})) for item in base]
        return [*kept, *changes.values()]
    return copy.deepcopy(change)


def _dump(documents: list[Json]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=110)
