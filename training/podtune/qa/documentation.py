"""Questions about Python objects, from the documentation that every Python installation carries.

What a function does, how it is called, which parameters it takes, what it raises and returns: from the source
of the standard library and of installed packages, parsed and never run, and from the help texts of the
interpreter's own C modules. The same Python and packages give the same rows.

What two objects say in the same words is kept once, so that no answer of eval stands in train.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from podtune.qa.interpreter import objects_of_the_interpreter
from podtune.qa.python_objects import SKIPPED, PythonObject, objects_of_file
from podtune.qa.row import Row, order_of
from podtune.run.collection import without_collection

DESCRIPTION = (
    "Questions and answers about Python objects, from the documentation strings and signatures of installed "
    "source."
)
# Packages of requirements.txt whose documentation strings are prose; parsed after the standard library, in
# this order.
PACKAGES = (
    ("numpy", "numpy"),
    ("jinja2", "jinja2"),
    ("click", "click"),
    ("typer", "typer"),
    ("yaml", "PyYAML"),
    ("packaging", "packaging"),
    ("filelock", "filelock"),
    ("fsspec", "fsspec"),
    ("rich", "rich"),
    ("psutil", "psutil"),
    ("huggingface_hub", "huggingface-hub"),
    ("accelerate", "accelerate"),
)
_ANSWER_CHARACTERS = 600
_LONGEST_SIGNATURE = 180
# Asked of a signature that stands in the question: answerable without knowing the object.
_READING = ("parameters", "default", "required")
# of all rows, at most; the rest is prose
_SHARES = {"signature": 0.2, "base": 0.04, **dict.fromkeys(_READING, 0.05)}

_PHRASES = {
    "purpose": ("What does {name} do?", "What is {name} for?", "What is the {sort} {name}?"),
    "description": (
        "Explain {name}.",
        "Describe the {sort} {name}.",
        "How does {name} work?",
        "What should I know about {name}?",
    ),
    "signature": ("How is {name} called?", "What is the signature of {name}?", "Show how to call {name}."),
    "raises": ("What does {name} raise?", "Which exceptions can {name} raise?"),
    "returns": ("What does {name} return?", "What is the result of {name}?"),
    "base": ("What does the class {name} derive from?", "Which class does {name} extend?"),
    "parameters": ("Which parameters does {call} take?", "Name the parameters of {call}."),
    "default": (
        "What is the default of {parameter} in {call}?",
        ("In {call}, what is {parameter} if it is left out?"),
    ),
    "required": ("Which arguments must be given to {call}?", "What has to be passed to {call}?"),
}


_ROLES = re.compile(r":[a-zA-Z:+-]+:`~?\.?([^`<]*?)(?:\s*<[^>]*>)?`")
_LITERAL = re.compile(r"``?([^`]*?)``?")
_LINK = re.compile(r"\[`?~?([^\]`]+)`?\](?:\([^)]*\))?")
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Raises|Yields|Attributes|Examples?|Notes?|See "
    r"Also|References|Warnings?|Usage)\s*:?$"
)
_NOT_PROSE = re.compile(r"^(>>>|\.\.|:\w+|[-=~*#`|+<>$@]{2}|[-*•] |\d+[.)] |@)")


@dataclass(frozen=True)
class DocumentedRow(Row):
    """A row that says where its answer comes from."""

    module: str
    package: str
    version: str
    license: str


def questions(rows: int, seed: int) -> list[DocumentedRow]:
    """At most ``rows`` questions about the objects of this installation."""
    with without_collection():  # syntax trees are many objects and no garbage
        return draw(every_question(documented_objects(), seed), rows, seed)


def documented_objects() -> Iterator[PythonObject]:
    """All of them: the standard library first, then :data:`PACKAGES` as far as installed; in a fixed
    order.
    """
    standard = ("python", platform.python_version(), "PSF-2.0")
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIPPED & {part.removesuffix(".py") for part in parts} and not any(
            part.startswith(("_", "config-")) for part in parts[:-1]
        ):
            yield from objects_of_file(path, root, standard)
    yield from objects_of_the_interpreter(standard)
    for package, distribution in PACKAGES:
        spec = importlib.util.find_spec(package)  # a top-level name: finds, does not import
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(next(iter(spec.submodule_search_locations)))
        provenance = (distribution, importlib.metadata.version(distribution), _license(distribution))
        for path in sorted(folder.rglob("*.py")):
            if not SKIPPED & {part.removesuffix(".py") for part in path.relative_to(folder.parent).parts}:
                yield from objects_of_file(path, folder.parent, provenance)


def _license(distribution: str) -> str:
    metadata = importlib.metadata.metadata(distribution)
    stated = next((str(metadata[key]) for key in ("License-Expression", "License") if key in metadata), "")
    if not stated or "\n" in stated or len(stated) > 40:
        classifiers = [
            line.split(" :: ")[-1]
            for line in metadata.get_all("Classifier") or ()
            if line.startswith("License ::")
        ]
        stated = classifiers[0] if classifiers else "see the package"
    return stated


def every_question(objects: Iterable[PythonObject], seed: int) -> Iterator[DocumentedRow]:
    """Every question about every object, without those that repeat an earlier one in other words."""
    seen: set[str] = set()
    for thing in objects:
        for kind, values, answer in _facts(thing, seed):
            phrases = _PHRASES[kind]
            question = phrases[order_of(seed, thing.name, kind) % len(phrases)].format(
                name=thing.name + ("()" if thing.callable and kind != "signature" else ""),
                sort=thing.sort,
                **values,
            )
            keys = {question, *_same(kind, thing, values, answer)}
            if keys & seen:
                continue
            seen |= keys
            yield DocumentedRow(
                *(question, answer, kind, thing.name),
                *(thing.module, thing.package, thing.version, thing.license),
                group=_group(thing.name),
            )


def _facts(thing: PythonObject, seed: int) -> Iterator[tuple[str, dict[str, str], str]]:
    """(kind, what the question names, answer) for all that is known of ``thing``."""
    paragraphs = prose(thing.doc)
    summary = whole_sentences(paragraphs[0], _ANSWER_CHARACTERS) if paragraphs else ""
    details = whole_sentences(" ".join(paragraphs[1:5]), _ANSWER_CHARACTERS)
    if summary:
        yield "purpose", {}, summary
    if summary and details:
        yield "description", {}, whole_sentences(f"{summary} {details}", _ANSWER_CHARACTERS)
    if thing.raises:
        yield "raises", {}, _listed(thing.raises) + "."
    if returned := _returned(thing, paragraphs[1:]):
        yield "returns", {}, returned
    if thing.bases:
        yield "base", {}, _listed(thing.bases) + "."
    if thing.signature is None or len(thing.signature) > _LONGEST_SIGNATURE:
        return
    call = f"{thing.short}{thing.signature}"
    yield "signature", {}, f"{thing.name}{thing.signature}"
    if 2 <= len(thing.parameters) <= 8:
        yield "parameters", {"call": call}, _listed(thing.parameters) + "."
        if thing.required and len(thing.required) < len(thing.parameters):
            yield "required", {"call": call}, _listed(thing.required) + "."
    if thing.defaults:
        names = sorted(thing.defaults)
        parameter = names[order_of(seed, thing.name, "which") % len(names)]
        yield "default", {"call": call, "parameter": parameter}, thing.defaults[parameter]


def _same(kind: str, thing: PythonObject, values: dict[str, str], answer: str) -> set[str]:
    """What another row shares if it says the same: the words, without case, digits and punctuation, with and
    without the
    object's own name."""
    if kind in _READING:
        return {f"{kind}:{values['call']}:{values.get('parameter', '')}"}
    if kind in ("raises", "base"):
        return {f"{kind}:{thing.name}"}
    if kind == "signature":
        return {f"{kind}:{thing.short}{thing.signature}"}
    words = re.findall(r"[a-z]+", answer.lower())
    own = set(re.findall(r"[a-z]+", thing.short.lower()))
    return {" ".join(words), "without name:" + " ".join(word for word in words if word not in own)}


def draw(every: Iterable[DocumentedRow], rows: int, seed: int) -> list[DocumentedRow]:
    """At most ``rows`` of them, in an order that their hashes decide, with bounded shares of signatures and
    reading exercises.
    """
    ordered = sorted(every, key=lambda row: (order_of(seed, row.question, row.answer), row.question))
    room = {kind: int(rows * share) for kind, share in _SHARES.items()}
    first: list[DocumentedRow] = []
    rest: list[DocumentedRow] = []
    for row in ordered:
        within = room.get(row.kind, 1) > 0
        room[row.kind] = room.get(row.kind, rows) - 1
        (first if within else rest).append(row)
    kept = set(first[:rows]) | set(rest[: max(0, rows - len(first))])
    return [row for row in ordered if row in kept]


def _group(name: str) -> str:
    """A class and its methods are held out together, and so is a name in a package's several modules."""
    words = name.split(".")
    owner = next((word for word in words if word[:1].isupper()), words[-1])
    return f"{words[0]}\0{owner}"


def _returned(thing: PythonObject, paragraphs: list[str]) -> str | None:
    """A sentence that says what is returned, other than the first paragraph; else the annotation."""
    for text in paragraphs:
        if re.match(r"(?:Returns?|Yields?)\b[: ].*", text) and 12 <= len(text) <= 240:
            return text
    if thing.annotation and thing.annotation != "None" and len(thing.annotation) < 80:
        return f"{thing.annotation}."
    return None


def _listed(names: Iterable[str]) -> str:
    words = list(names)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


# ---- documentation strings as plain sentences ----
def prose(doc: str) -> list[str]:
    """The paragraphs of a documentation string that are sentences, as plain text in one line each.

    Headings of sections and what stands under Parameters and the like are left out, and so are examples and
    tables. The first paragraph of a section Returns is kept, with that word before it.
    """
    paragraphs: list[str] = []
    section = ""
    for block in re.split(r"\n\s*\n", doc.expandtabs()):
        lines = [line for line in block.split("\n") if not re.fullmatch(r"\s*[-=~^*]{3,}\s*", line)]
        if lines and _SECTION.fullmatch(lines[0].strip()):
            section = lines.pop(0).strip().rstrip(":")
        if not lines:
            continue
        if (
            section in ("Returns", "Return", "Yields")
            and len(lines) > 1
            and _indent(lines[1]) > _indent(lines[0])
        ):
            lines.pop(0)  # numpy's style: a name or a type stands above its description
        text = plain(" ".join(line.strip() for line in lines))
        if section in ("Returns", "Return", "Yields"):
            item = re.sub(r"^[\w.\[\], |]{1,40}: ", "", text)
            text, section = f"{section.rstrip('s')}s {item[:1].lower()}{item[1:]}", "passed"
        elif section or (paragraphs and all(line.startswith("  ") for line in lines)):  # indented: an example
            continue
        if is_prose(text):
            paragraphs.append(text)
    return paragraphs


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def plain(text: str) -> str:
    """Text without reStructuredText and Markdown marks."""
    text = _ROLES.sub(r"\1", text)
    text = _LINK.sub(r"\1", text)
    text = _LITERAL.sub(r"\1", text)
    text = re.sub(r"\*\*?([^*\s][^*]*?)\*\*?", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def is_prose(text: str) -> bool:
    """True for a sentence: begins with a letter, is mostly words."""
    if len(text) < 15 or _NOT_PROSE.match(text) or not text[0].isalpha():
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    return letters / len(text) > 0.75 and len(text.split()) >= 3


def whole_sentences(text: str, longest: int) -> str:
    """As many whole sentences from the start as fit; an empty string if the first does not."""
    kept = ""
    for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text):
        if len(kept) + len(sentence) + 1 > longest:
            break
        kept = f"{kept} {sentence}".strip()
    kept = kept.rstrip(":; ")
    return kept + "." if kept and kept[-1].isalnum() else kept
