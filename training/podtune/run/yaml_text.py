"""YAML that people pass, read within bounds: a hostile file costs a sentence. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, NotFound

MAX_VALUES = 100_000  # with aliases written out: a few lines of them can stand for more than memory holds


def load(text: str, where: str) -> object:
    """Return the content of one YAML document: mappings, lists, texts, numbers, booleans and None.

    Raises:
        ConfigError: at ``where``: it is not YAML, too deep, or too large; a key stands twice in one mapping;
            a number has too many digits; or a value is of another kind, such as ``!!set``.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        # of what JSON has, too: a date stays the text that it is, as in helm
        loader.yaml_implicit_resolvers = {
            first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
            for first, forms in loader.yaml_implicit_resolvers.items()
        }
        root = loader.get_single_node()
        _refuse_doubles(root, where)
        content = loader.construct_document(root) if root else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise ConfigError(f"not YAML: {getattr(error, 'problem', error)}", where=place) from None
    except (RecursionError, ValueError, OverflowError) as error:
        raise ConfigError(f"not YAML that can be read: {str(error)[:200]}", where=where) from None
    waiting, count = [content], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise ConfigError(f"holds more than {MAX_VALUES} values, aliases written out", where=where)
        if isinstance(value, dict | list):
            waiting += [*value, *value.values()] if isinstance(value, dict) else value
        elif not isinstance(value, str | int | float | None):
            kind = type(value).__name__
            raise ConfigError(f"holds a {kind}, which is no text, number, list or mapping", where=where)
    return content


def _refuse_doubles(root: Any, where: str) -> None:
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        lines: dict[str, int] = {}
        for each in node.value:
            waiting += each if isinstance(each, tuple) else [each]
            if isinstance(each, tuple) and isinstance(key := each[0].value, str):
                line = each[0].start_mark.line + 1
                if (before := lines.setdefault(key, line)) != line:
                    raise ConfigError(
                        f"'{key}' is set twice, in line {before} and in line {line}",
                        where=where,
                        fix="remove one of them",
                    )


def read_mapping(path: Path, *, fix: str) -> dict[str, Any]:
    """Read a file of keys and values; ``fix`` says what to give in place of one that is not there.

    Raises:
        NotFound: it is missing or cannot be read.
        ConfigError: as :func:`load`; or it holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound("no such file", where=str(path), fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"cannot be read: {error}", where=str(path)) from None
    content = load(text, str(path))
    if not isinstance(content, dict):
        raise ConfigError(
            "is not a mapping of keys to values", where=str(path), fix="write one 'key: value' a line"
        )
    return content
