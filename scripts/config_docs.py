"""Fill the generated parts of docs/*.md from the code; a test holds them equal.

    python scripts/config_docs.py            # after a change of an argument, an error message or a right

A generated part stands between `<!-- generated: KIND WORDS -->` and `<!-- end -->`:
keys CLASS (arguments of a fine-tune), environment, renamed, benchmark, messages PREFIX... (errors of the modules below
training/ that begin with a prefix; of several the longest counts), rights (the Role of docs/cluster.md).
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from training.run import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "training"
PART = re.compile(r"(<!-- generated: (\w+)((?: [\w/]+)*) -->\n).*?(<!-- end -->\n)", re.DOTALL)
ERRORS = ("UserError", "fail", "PeerLost")
GAP = "…"  # where a message names what it found
#: what to do where the message itself says it all
OBVIOUS = {
    **dict.fromkeys(("2", "64", "78"), "correct the value that is named"),
    "65": "correct the content that is named",
    "66": "correct the path, or let it be read",
    "73": "name a place that can be written",
}


def filled(text: str) -> str:
    """A page with every generated part as the code has it today."""
    return PART.sub(lambda part: f"{part[1]}\n{KINDS[part[2]](part[3].split())}\n{part[4]}", text)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown; the cells are Markdown too."""
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ("---",) * len(head), *rows])


def escaped(text: str) -> str:
    """Text for a table: nothing that Markdown would take for a tag, emphasis or the end of a cell."""
    return text.replace("<", "&lt;").replace("*", r"\*").replace("|", r"\|")


# ---- configuration ----
def keys(classes: list[str]) -> str:
    """Keys of the training YAML. Ours with their help, TRL's with what config_keys.json knows of them."""
    from training.sft.config import ABOVE_ZERO, AT_LEAST, known_keys

    rows = []
    for name, spec in known_keys().items():
        if spec["class"] not in classes:
            continue
        bound = "above 0" if name in ABOVE_ZERO else f"at least {AT_LEAST[name]}" if name in AT_LEAST else ""
        choices = " ".join(f"`{one}`" for one in spec.get("choices") or [])
        about = "; ".join(text for text in (escaped(spec.get("help", "")), choices, bound) if text)
        rows.append((f"`{name}`", spec["type"], f"`{spec['default']}`", about))
    return table(("key", "type", "default", "meaning" if "RunArguments" in classes else "choices, bounds"), rows)


def environment(_: list[str]) -> str:
    """Environment names and the keys they stand for."""
    from training.sft.config import ENVIRONMENT

    return table(("variable", "key"), [(f"`{name}`", f"`{key}`") for name, key in ENVIRONMENT.items()])


def renamed(_: list[str]) -> str:
    """Keys of older versions, and what to write instead."""
    from training.sft.config import RENAMED

    return table(("key", "use"), [(f"`{name}`", new) for name, new in RENAMED.items()])


def benchmark(_: list[str]) -> str:
    """Options of one benchmark cell."""
    from training.bench.options import parser

    actions = [action for action in parser()._actions if action.dest != "help"]
    rows = []
    for action in actions:
        choices = " ".join(f"`{one}`" for one in action.choices or [])
        about = "; ".join(text for text in (action.help or "", choices) if text)
        rows.append((f"`{action.option_strings[0]}`", "needed" if action.required else f"`{action.default}`", escaped(about)))
    return table(("option", "default", "meaning"), rows)


def rights(_: list[str]) -> str:
    """The Role that podtune's cluster commands need."""
    from training.cluster.doctor import rules

    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "podtune-user"}, "rules": rules()}
    return f"```yaml\n{yaml.safe_dump(role, default_flow_style=None, sort_keys=False, width=120)}```\n"


# ---- error messages ----
@dataclass(frozen=True, order=True)
class Message:
    """One error as the source has it, with a gap for each value."""

    text: str
    fix: str
    code: str


def messages(prefixes: list[str]) -> str:
    """The errors of the modules that belong to this part."""
    found = {message for path in PACKAGE.rglob("*.py") if topic(path) in prefixes for message in module_messages(path.read_text("utf-8"))}
    return table(
        ("message", "what to do", "code"),
        [(escaped(one.text), escaped(one.fix) or OBVIOUS.get(one.code, "see above"), one.code) for one in sorted(found)],
    )


@functools.cache
def prefixes_of_all_parts() -> list[str]:
    """The prefixes that docs/troubleshooting.md names."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    return [prefix for part in PART.finditer(page) if part[2] == "messages" for prefix in part[3].split()]


def topic(path: Path) -> str:
    """The prefix that a module belongs to; SystemExit if it raises errors and there is none."""
    name = path.relative_to(PACKAGE).as_posix()
    fitting = [prefix for prefix in prefixes_of_all_parts() if name.startswith(prefix)]
    if not fitting and module_messages(path.read_text("utf-8")):
        raise SystemExit(
            f"training/{name} raises errors and no part of docs/troubleshooting.md takes them: add it to a 'generated: messages'"
        )
    return max(fitting, key=len, default="")


@functools.cache
def module_messages(source: str) -> frozenset[Message]:
    """Every UserError and PeerLost that a module can raise; none for one that only passes on what a library says."""
    tree = ast.parse(source)
    found = set()
    for function, call in _raised(tree):
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        code = str(errors.PEER_LOST) if ast.unparse(call.func) == "PeerLost" else _code(named.get("code"))
        for names in _meanings(function, tree):
            fix = _texts(named["fix"], names)[0] if "fix" in named else ""
            for text in _texts(call.args[0], names):
                text = " ".join(text.split("\n")[0].split())
                if re.search(r"\w{3}", text):
                    found.add(Message(text, "" if fix == GAP else " ".join(fix.split()), code))
    return frozenset(found)


def _raised(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
    """Every error made in a module, with the innermost function around it."""
    inner: dict[ast.AST, ast.FunctionDef | None] = {tree: None}
    for node in ast.walk(tree):  # breadth first: the node above comes before
        for child in ast.iter_child_nodes(node):
            inner[child] = node if isinstance(node, ast.FunctionDef) else inner[node]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
            yield inner[node], node


def _code(node: ast.expr | None) -> str:
    if node is None:
        return str(errors.CONFIG)
    if isinstance(node, ast.Constant):
        return str(node.value)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return str(getattr(errors, name)) if name.isupper() else "its own"


def _meanings(function: ast.FunctionDef | None, tree: ast.Module) -> list[dict[str, list[str]]]:
    """What the names in a function can be: variables by their assignments, and parameters by each call in the module."""
    if function is None:
        return [{}]
    variables: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variables.setdefault(node.targets[0].id, []).extend(_texts(node.value, {}))
    parameters = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs) if argument.arg != "self"]
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == function.name
    ]
    meanings = []
    for call in calls:
        given = dict(zip(parameters, call.args, strict=False)) | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        meanings.append(variables | {name: _texts(value, {}) for name, value in given.items()})
    return meanings or [variables]


def _texts(node: ast.expr, names: dict[str, list[str]]) -> list[str]:
    """The strings that an expression can be, with a gap for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return _texts(node.body, names) + _texts(node.orelse, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([node.left, node.right], names)
    if isinstance(node, ast.JoinedStr):
        return _joined(node.values, names)
    if isinstance(node, ast.FormattedValue):
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "near":
            return [""]  # a suggestion, where there is one
        return _texts(node.value, names) if isinstance(node.value, ast.Name) else [GAP]
    if isinstance(node, ast.Name):
        return names.get(node.id) or [GAP]
    return [GAP]


def _joined(parts: Sequence[ast.expr], names: dict[str, list[str]]) -> list[str]:
    return ["".join(words) for words in itertools.product(*(_texts(part, names) for part in parts))]


KINDS = {
    "keys": keys,
    "environment": environment,
    "renamed": renamed,
    "benchmark": benchmark,
    "rights": rights,
    "messages": messages,
}

if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
