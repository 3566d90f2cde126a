"""Reading manifests: several documents, the line of every value, and YAML errors with their place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

Json = dict[str, Any]

# The C parser where PyYAML was built with it: twenty times as fast.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Reads as Kubernetes does: a date stays a string."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}


@dataclass
class Document:
    """One YAML document (or one item of a ``kind: List``) and where its values stand."""

    content: Json
    source: str
    node: Any = field(repr=False)

    @property
    def kind(self) -> str:
        return str(self.content.get("kind") or "")

    @property
    def name(self) -> str:
        metadata = self.content.get("metadata")
        return str((metadata.get("name") if isinstance(metadata, dict) else None) or "")

    def line(self, path: tuple[str | int, ...]) -> int:
        """The line, from 1, of the value at ``path``, or of the nearest thing around it that exists."""
        node, mark = self.node, self.node.start_mark
        for key in path:
            found = _child(node, key)
            if found is None:
                break
            mark, node = found
        return int(mark.line) + 1


@dataclass(frozen=True)
class YamlError:
    """A document that cannot be read."""

    source: str
    line: int
    message: str
    fix: str


def read(text: str, source: str) -> tuple[list[Document], list[YamlError]]:
    """The documents of ``text`` up to the first that is not YAML, and the errors found."""
    documents: list[Document] = []
    errors: list[YamlError] = []
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            errors += [
                YamlError(source, line, (f"{key!r} is given twice; the last one wins"), "remove one")
                for key, line in _duplicates(node)
            ]
            content = loader.construct_document(node)
            documents += _unlisted(content, node, source) if isinstance(content, dict) else []
            if content is not None and not isinstance(content, dict):
                errors.append(
                    YamlError(
                        source,
                        node.start_mark.line + 1,
                        "this document is not a mapping",
                        "start it with apiVersion and kind",
                    )
                )
    except yaml.YAMLError as error:
        errors.append(_explained(error, text, source))
    finally:
        loader.dispose()
    return documents, errors


def _unlisted(content: Json, node: Any, source: str) -> Iterator[Document]:
    """The items of a ``kind: List``, which `kubectl get -o yaml` prints, or the document itself."""
    if content.get("kind") != "List" or not isinstance(content.get("items"), list):
        yield Document(content, source, node)
        return
    found = _child(node, "items")
    for index, item in enumerate(content["items"]):
        place = _child(found[1], index) if found else None
        if isinstance(item, dict):
            yield Document(item, source, place[1] if place else node)


def _child(node: Any, key: str | int) -> tuple[Any, Any] | None:
    """(mark of the key, node of the value), or None."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None


def _duplicates(node: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    if depth > 100:  # an anchor that contains itself
        return
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value != "<<":
                if name.value in seen:
                    yield name.value, name.start_mark.line + 1
                seen.add(name.value)
            yield from _duplicates(value, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _duplicates(value, depth + 1)


def _explained(error: yaml.YAMLError, text: str, source: str) -> YamlError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark else 1 + text.count("\n", 0, getattr(error, "position", 0))
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    place = f" (column {mark.column + 1})" if mark else ""
    if re.search(r"\{\{.*\}\}", text):
        fix = "this is a Helm template: render it first, podtune render -f VALUES | podtune lint -"
    elif "\t" in text:
        fix = "indent with spaces, not tabs"
    else:
        fix = "correct the YAML at this line; the indentation above it counts, too"
    return YamlError(source, line, f"not YAML: {context + ', ' if context else ''}{problem}{place}", fix)
