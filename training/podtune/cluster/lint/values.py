"""YAML as kubectl reads it, which is not quite PyYAML's way.

A date and ``1:30`` are strings, ``5e-5`` is a number, and the keys of a mapping are always strings.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from podtune.cluster.job.manifest import Json
from podtune.cluster.lint.diagnostic import Diagnostic

MAX_DEPTH = 200
# How many times as large as it is a document may be with its aliases written out, beyond 100,000 values.
MAX_GROWTH = 10
# The C parser where PyYAML was built with it: twenty times as fast.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(_Base):  # type: ignore[misc]
    """A loader without dates, which Kubernetes has none of."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tags: dict[tuple[str, bool], str] = {}

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """The tag of a node; that of a scalar is looked up once for each text."""
        if kind is not yaml.ScalarNode:
            return super().resolve(kind, value, implicit)
        key = (value, implicit[0])
        if key not in self.tags:
            self.tags[key] = super().resolve(kind, value, implicit)
        return self.tags[key]


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
TAG = "tag:yaml.org,2002:"
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTRUCTOR = yaml.constructor.SafeConstructor()
_CONSTRUCT = {
    "null": _CONSTRUCTOR.construct_yaml_null,
    "bool": _CONSTRUCTOR.construct_yaml_bool,
    "int": _CONSTRUCTOR.construct_yaml_int,
    "float": _CONSTRUCTOR.construct_yaml_float,
}


class Builder:
    """A builder of one document's values from its nodes.

    An alias gives the same object again, so that it costs nothing; how large the document would be with all
    of them written out is counted.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.errors: list[Diagnostic] = []
        self.built: dict[int, tuple[Any, int]] = {}  # id of a node -> its value, and the values in it
        self.open: set[int] = set()
        self.written = 0  # values that stand in the text

    def value(self, node: Any) -> Any:
        """The content of a document."""
        return self._of(node, 0)[0]

    def _of(self, node: Any, depth: int) -> tuple[Any, int]:
        self.written += 1
        if type(node) is yaml.ScalarNode:
            return _scalar(node), 1
        key = id(node)
        if key in self.built:
            return self.built[key]
        if key in self.open or depth > MAX_DEPTH:
            problem = "an anchor contains itself" if key in self.open else f"nested deeper than {MAX_DEPTH}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        self.open.add(key)
        built = self._mapping(node, depth) if type(node) is yaml.MappingNode else self._sequence(node, depth)
        self.open.discard(key)
        if built[1] > 100_000 + MAX_GROWTH * self.written:
            problem = f"its aliases stand for more than {built[1]} values"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        self.built[key] = built
        return built

    def _sequence(self, node: Any, depth: int) -> tuple[list[Any], int]:
        pairs = [self._of(item, depth + 1) for item in node.value]
        return [value for value, _ in pairs], 1 + sum(size for _, size in pairs)

    def _mapping(self, node: Any, depth: int) -> tuple[Json, int]:
        content: Json = {}
        merges: list[Json] = []
        total = 1
        for name, item in node.value:
            value, size = self._of(item, depth + 1)
            total += size
            if name.tag == TAG + "merge":
                merges += value if isinstance(value, list) else [value]
                continue
            key = _key(name)
            if key in content:
                message = f"{key!r} is given twice; the last one wins"
                line = name.start_mark.line + 1
                self.errors.append(yaml_error(self.source, line, message, "remove one of them"))
            content[key] = value
        for merge in merges:
            if not isinstance(merge, dict):
                raise yaml.constructor.ConstructorError(None, None, "<< of no mapping", node.start_mark)
            content = {**merge, **content}
        return content, total


def _key(node: Any) -> str:
    if type(node) is not yaml.ScalarNode:
        raise yaml.constructor.ConstructorError(None, None, "a key that is no text", node.start_mark)
    value = _scalar(node)
    if isinstance(value, bool):
        return "true" if value else "false"
    return node.value if isinstance(value, str) else "null" if value is None else str(value)


def _scalar(node: Any) -> Any:
    text, tag = node.value, node.tag
    if tag == TAG + "str":
        plain = not node.style and text[:1] in "0123456789+-."
        return float(text) if plain and text and _NUMBER.fullmatch(text) else text
    kind = tag.removeprefix(TAG)
    if kind in ("timestamp", "binary", "value", "merge") or (kind in ("int", "float") and ":" in text):
        return text
    if len(text) > 400:
        raise ValueError(f"a number of {len(text)} digits")
    if kind not in _CONSTRUCT:
        problem = f"the tag {tag!r} is none of YAML's"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return _CONSTRUCT[kind](node)


def yaml_error(source: str, line: int, message: str, fix: str) -> Diagnostic:
    """PT001 at a line."""
    return Diagnostic((), message, "error", fix, "api", "PT001", source=source, line=line)
