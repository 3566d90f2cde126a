"""Public Python objects as their source describes them: name, signature, documentation string. Parsed, never
run.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED = {  # tests, programs, tables and what later versions of Python no longer have
    *(
        "test",
        "tests",
        "testing",
        "conftest",
        "idlelib",
        "turtledemo",
        "site-packages",
        "dist-packages",
        "ensurepip",
        "lib-dynload",
    ),
    *("encodings", "pydoc_data", "lib2to3", "distutils", "tix", "msilib"),
}
_LONGEST_NAME = 60


@dataclass(frozen=True)
class PythonObject:
    """A public module, class or function with what its source says about it.

    Attributes:
        name: dotted, with the module: ``json.dumps``.
        short: the last part, for a method with its class.
        sort: module, class, function, method or property.
        doc: the documentation string, unindented; may be empty.
        signature: ``(a, b=1) -> int`` without self; None if unknown or a module.
        parameters: names, with the stars of ``*args``.
        required: those that must be given.
        defaults: source of the default by parameter.
        raises: names of exceptions in its raise statements, in order.
        bases: of a class.
        annotation: source of the return annotation.
    """

    name: str
    short: str
    sort: str
    module: str
    package: str
    version: str
    license: str
    doc: str = ""
    signature: str | None = None
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    raises: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    annotation: str | None = None

    @property
    def callable(self) -> bool:
        """True for functions and methods."""
        return self.sort in ("function", "method")


# ---- from source ----
def objects_of_file(path: Path, root: Path, provenance: tuple[str, str, str]) -> Iterator[PythonObject]:
    words = list(path.relative_to(root).with_suffix("").parts)
    if words[-1] == "__init__":
        words.pop()
    if not words or any(word.startswith("_") for word in words):
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # other people's escape sequences
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # a file for another version of Python, or templates
        return
    module = ".".join(words)
    if doc := ast.get_docstring(tree):
        yield PythonObject(module, words[-1], "module", module, *provenance, doc=doc)
    yield from _of_body(tree.body, module, "", provenance)


def _of_body(
    body: list[ast.stmt], module: str, owner: str, provenance: tuple[str, str, str]
) -> Iterator[PythonObject]:
    for node in body:
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("_"):
            short = f"{owner}.{node.name}" if owner else node.name
            name = f"{module}.{short}"
            if len(name) > _LONGEST_NAME:
                continue
            decorators = {
                _source(item).split(".")[-1]
                for item in node.decorator_list
                if isinstance(item, ast.Name | ast.Attribute)
            }
            if isinstance(node, ast.ClassDef):
                bases = tuple(_source(base) for base in node.bases)
                plain = tuple(base for base in bases if base != "object" and len(base) < 60)
                yield PythonObject(
                    name, short, "class", module, *provenance, doc=ast.get_docstring(node) or "", bases=plain
                )
                yield from _of_body(node.body, module, short, provenance)
            elif decorators & {"setter", "deleter", "overload"}:
                continue
            elif decorators & {"property", "cached_property"}:
                yield PythonObject(
                    name,
                    short,
                    "property",
                    module,
                    *provenance,
                    doc=ast.get_docstring(node) or "",
                    raises=_raised(node),
                )
            else:
                yield _of_function(node, name, short, module, owner, provenance)
        elif isinstance(node, ast.If | ast.Try) and not owner:
            yield from _of_body(node.body, module, owner, provenance)


def _of_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    short: str,
    module: str,
    owner: str,
    provenance: tuple[str, str, str],
) -> PythonObject:
    arguments = node.args
    defaults = {argument.arg: _source(value) for argument, value in _with_defaults(arguments)}
    positional = [*arguments.posonlyargs, *arguments.args]
    static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
    if owner and not static:
        positional = positional[1:]  # self or cls
    star = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    stars = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    named = [*(item.arg for item in positional), *(item.arg for item in arguments.kwonlyargs)]
    annotation = _source(node.returns) if node.returns else None
    return PythonObject(
        name,
        short,
        "method" if owner else "function",
        module,
        *provenance,
        doc=ast.get_docstring(node) or "",
        signature=_signature(arguments, positional, defaults, annotation),
        parameters=(
            *(item.arg for item in positional),
            *star,
            *(item.arg for item in arguments.kwonlyargs),
            *stars,
        ),
        required=tuple(item for item in named if item not in defaults),
        defaults={key: value for key, value in defaults.items() if len(value) <= 40 and key in named},
        raises=_raised(node),
        annotation=annotation,
    )


def _signature(
    arguments: ast.arguments, positional: list[ast.arg], defaults: dict[str, str], annotation: str | None
) -> str:
    """``(a, /, b: int = 1, *, c) -> str`` of the arguments that a caller gives."""

    def shown(argument: ast.arg, stars: str = "") -> str:
        kind = f": {_source(argument.annotation)}" if argument.annotation else ""
        value = defaults.get(argument.arg) if not stars else None
        equals = " = " if kind else "="
        return stars + argument.arg + kind + (f"{equals}{value}" if value is not None else "")

    parts = []
    for argument in positional:
        parts.append(shown(argument))
        if arguments.posonlyargs and argument is arguments.posonlyargs[-1]:
            parts.append("/")
    if arguments.vararg:
        parts.append(shown(arguments.vararg, "*"))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [shown(argument) for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        parts.append(shown(arguments.kwarg, "**"))
    return f"({', '.join(parts)})" + (f" -> {annotation}" if annotation else "")


def _source(node: ast.expr) -> str:
    """The expression as source; the common ones by hand, because ``ast.unparse`` is slow."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | bool | type(None)):
        return repr(node.value)
    if isinstance(node, ast.Attribute):
        return f"{_source(node.value)}.{node.attr}"
    return ast.unparse(node)


def _with_defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    if arguments.defaults:
        yield from zip(positional[-len(arguments.defaults) :], arguments.defaults, strict=True)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if value is not None:
            yield argument, value


def _raised(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Names that start in upper case in the function's own raise statements; a re-raise has none."""
    names: dict[str, None] = {}
    for statement in _statements(node.body):
        if isinstance(statement, ast.Raise) and statement.exc is not None:
            target = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
            text = _source(target) if isinstance(target, ast.Name | ast.Attribute) else ""
            if text.split(".")[-1][:1].isupper() and len(text) < 50:
                names[text] = None
    return tuple(names)[:4]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement of a body, without those of functions and classes in it and without looking into
    expressions.
    """
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, part, []))
        for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _statements(branch.body)
