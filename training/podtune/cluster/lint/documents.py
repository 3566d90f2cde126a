"""Reading manifests: several documents, the line of every value, and YAML errors with their place.

Scalars are read as kubectl reads them, which is not quite PyYAML's way: a date and ``1:30`` are strings,
``5e-5`` is a number, and the keys of a mapping are always strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from podtune.cluster.lint.diagnostic import Diagnostic, Json, Place
from podtune.run.errors import DataError

MAX_DEPTH = 200
# How many times as large as it is a document may be with its aliases written out, beyond 100,000 values.
MAX_GROWTH = 10
JOBS = ("PyTorchJob", "TrainJob")
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
KINDS = (*JOBS, *RUNTIMES)
GROUPS = ("kubeflow.org", "trainer.kubeflow.org")

# The C parser where PyYAML was built with it: twenty times as fast.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
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


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_TAG = "tag:yaml.org,2002:"
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BOOLEAN = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass
class Document:
    """One YAML document, or an object inside one: an item of a List, a job in an AppWrapper."""

    content: Json
    source: str
    node: Any = field(repr=False)
    holder: str = ""  # the kind of the object around it

    @property
    def kind(self) -> str:
        return str(self.content.get("kind") or "")

    @property
    def metadata(self) -> Json:
        metadata = self.content.get("metadata")
        return metadata if isinstance(metadata, dict) else {}

    @property
    def name(self) -> str:
        return str(self.metadata.get("name") or self.metadata.get("generateName") or "")

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace") or "")

    @property
    def group(self) -> str:
        """The group of apiVersion, "" for core/v1."""
        version = self.content.get("apiVersion")
        return version.rpartition("/")[0] if isinstance(version, str) else ""

    def line(self, path: Place) -> int:
        """The line, from 1, of the value at ``path``, or of what is around it where that is absent."""
        node, mark = self.node, self.node.start_mark
        for key in path:
            child = _child(node, key)
            if child is None:
                break
            mark, node = child
        return int(mark.line) + 1

    def text(self, path: Place) -> str | None:
        """The scalar at ``path`` as it is written, or None."""
        node = self.node
        for key in path:
            child = _child(node, key)
            if child is None:
                return None
            node = child[1]
        return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def is_foreign(document: Document) -> bool:
    """True for a kind of another operator's group, as KubeDL has a PyTorchJob too; not for a misspelt one."""
    group = document.group
    if not group or "kubeflow" in group:
        return False
    import difflib

    return not difflib.get_close_matches(group, GROUPS, n=1, cutoff=0.8)


def read(text: str, source: str) -> tuple[list[Document], list[Diagnostic]]:
    """The documents of ``text`` up to the first that is not YAML, and the errors in it."""
    documents: list[Document] = []
    errors: list[Diagnostic] = []
    loader = None
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            builder = _Builder(source)
            content = builder.value(node)
            errors += builder.errors
            if isinstance(content, dict):
                documents += _objects(content, node, source)
            elif content is not None:
                message, fix = "this document is not a mapping", "start it with apiVersion and kind"
                errors.append(_error(source, node.start_mark.line + 1, message, fix))
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        errors.append(_explained(error, text, source))
    finally:
        if loader is not None:
            loader.dispose()
    return documents, errors


def refuse_bombs(text: str, source: str) -> None:
    """Refuse text whose aliases, nesting or numbers would keep a reader busy for ever.

    Raises:
        UserError: it is no YAML, or one of these.
    """
    for error in read(text, source)[1]:
        if error.message.startswith("not YAML"):
            what = error.message.replace("not YAML", "is not YAML", 1)
            raise DataError(what, where=f"{source}:{error.line}", fix=error.fix)


class _Builder:
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
            if name.tag == _TAG + "merge":
                merges += value if isinstance(value, list) else [value]
                continue
            key = _key(name)
            if key in content:
                message = f"{key!r} is given twice; the last one wins"
                line = name.start_mark.line + 1
                self.errors.append(_error(self.source, line, message, "remove one of them"))
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
    if tag == _TAG + "str":
        plain = not node.style and text[:1] in "0123456789+-."
        return float(text) if plain and text and _NUMBER.fullmatch(text) else text
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return _BOOLEAN.get(text.lower(), text)
    if kind in ("int", "float") and ":" in text:
        return text
    if kind == "int":
        return _whole(text.replace("_", ""))
    if kind == "float":
        number = text.replace("_", "").lower()
        return float(number.replace(".inf", "inf").replace(".nan", "nan"))
    if kind in ("timestamp", "binary", "value", "merge"):
        return text
    raise yaml.constructor.ConstructorError(None, None, f"the tag {tag!r} is none of YAML's", node.start_mark)


def _whole(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    if len(digits) > 400:
        raise ValueError(f"a number of {len(digits)} digits")
    base = 16 if digits.startswith("0x") else 2 if digits.startswith("0b") else 10
    if base == 10 and digits.startswith("0") and len(digits) > 1:
        base = 8
    return sign * int(digits.removeprefix("0o"), base)


def _objects(content: Json, node: Any, source: str) -> Iterator[Document]:
    """The document itself, or the objects in a list of them or in what wraps a job."""
    if content.get("kind") in KINDS:
        yield Document(content, source, node)
        return
    kind = str(content.get("kind") or "")
    listed = kind.endswith("List") and isinstance(content.get("items"), list)
    inner = list(_inside(content, node, source, "" if listed else kind))
    if not listed:
        yield Document(content, source, node)
    yield from inner


def _inside(value: Any, node: Any, source: str, holder: str) -> Iterator[Document]:
    if isinstance(value, dict):
        pairs: Iterator[tuple[str | int, Any]] = iter(value.items())
    elif isinstance(value, list):
        pairs = iter(enumerate(value))
    else:
        return
    for key, item in pairs:
        if not isinstance(item, dict | list):
            continue
        child = _child(node, key)
        place = child[1] if child else node
        if isinstance(item, dict) and isinstance(item.get("kind"), str) and "apiVersion" in item:
            whole = "spec" in item or "metadata" in item  # not a reference, which has a name only
            if whole:
                yield from (
                    Document(inner.content, source, inner.node, inner.holder or holder)
                    for inner in _objects(item, place, source)
                )
                continue
        yield from _inside(item, place, source, holder)


def _child(node: Any, key: str | int) -> tuple[Any, Any] | None:
    """(mark of the key, node of the value), or None.

    What ``<<`` merges in is looked at last.
    """
    if isinstance(node, yaml.MappingNode):
        merged: list[Any] = []
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark, value
            if name.tag == _TAG + "merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        return next((child for alias in merged[:9] if (child := _child(alias, key))), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None


def _explained(error: Exception, text: str, source: str) -> Diagnostic:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark else 1 + text.count("\n", 0, getattr(error, "position", 0))
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, RecursionError):
        problem = "nested too deeply"
    context = getattr(error, "context", None)
    place = f" (column {mark.column + 1})" if mark else ""
    if re.search(r"\{\{.*\}\}", text):
        fix = "this is a Helm template: render it first, podtune render -f VALUES | podtune lint -"
    elif "\t" in text:
        fix = "indent with spaces, not tabs"
    else:
        fix = "correct the YAML at this line; the indentation above it counts, too"
    return _error(source, line, f"not YAML: {context + ', ' if context else ''}{problem}{place}", fix)


def _error(source: str, line: int, message: str, fix: str) -> Diagnostic:
    return Diagnostic((), message, "error", fix, "api", "PT001", source=source, line=line)
