"""Documented objects of the interpreter's own C modules: no source to parse, but text signatures."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

from podtune.qa.python_objects import PythonObject


def objects_of_the_interpreter(provenance: tuple[str, str, str]) -> Iterator[PythonObject]:
    """The C modules of the standard library, which have no source to parse but text signatures."""
    for module_name in sorted(sys.stdlib_module_names):
        if module_name.startswith("_"):
            continue
        spec = importlib.util.find_spec(module_name)
        loader = getattr(spec, "loader", None)
        compiled = loader is importlib.machinery.BuiltinImporter or isinstance(
            loader, importlib.machinery.ExtensionFileLoader
        )
        if spec is None or not compiled:
            continue
        with warnings.catch_warnings(action="ignore"):  # some are deprecated
            module = importlib.import_module(module_name)
        if module.__doc__:
            yield PythonObject(
                module_name,
                module_name,
                "module",
                module_name,
                *provenance,
                doc=inspect.cleandoc(module.__doc__),
            )
        for name, value in sorted(vars(module).items()):
            # hooks are there to be replaced, by a test runner too
            if not name.startswith("_") and not name.endswith("hook"):
                yield from _of_value(value, name, module_name, "", provenance)


def _of_value(
    value: object, name: str, module: str, owner: str, provenance: tuple[str, str, str]
) -> Iterator[PythonObject]:
    short = f"{owner}.{name}" if owner else name
    doc = (
        inspect.cleandoc(getattr(value, "__doc__", None) or "")
        if isinstance(getattr(value, "__doc__", None), str)
        else ""
    )
    if inspect.isclass(value) and not owner:
        if doc and (value.__module__ == module or module == "builtins"):
            yield PythonObject(f"{module}.{short}", short, "class", module, *provenance, doc=doc)
            for method, item in sorted(vars(value).items()):
                if not method.startswith("_"):
                    yield from _of_value(item, method, module, short, provenance)
    elif doc and isinstance(
        value, types.BuiltinFunctionType | types.MethodDescriptorType | types.ClassMethodDescriptorType
    ):
        yield PythonObject(
            f"{module}.{short}",
            short,
            "method" if owner else "function",
            module,
            *provenance,
            doc=doc,
            **_text_signature(value),
        )


def _text_signature(value: object) -> dict[str, Any]:
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return {}
    kept = [item for item in signature.parameters.values() if item.name not in ("self", "type", "cls")]
    named = [item for item in kept if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    try:
        shown = str(signature.replace(parameters=kept))
    except ValueError:
        return {}
    return {
        "signature": shown,
        "parameters": tuple(str(item).split("=")[0].split(":")[0] for item in kept),
        "required": tuple(item.name for item in named if item.default is item.empty),
        "defaults": {
            item.name: repr(item.default)
            for item in named
            if item.default is not item.empty and len(repr(item.default)) <= 40
        },
    }
