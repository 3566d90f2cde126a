"""Documentation strings as plain sentences."""

from __future__ import annotations

import re

_ROLES = re.compile(r":[a-zA-Z:+-]+:`~?\.?([^`<]*?)(?:\s*<[^>]*>)?`")
_LITERAL = re.compile(r"``?([^`]*?)``?")
_LINK = re.compile(r"\[`?~?([^\]`]+)`?\](?:\([^)]*\))?")
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Raises|Yields|Attributes|Examples?|Notes?|See "
    r"Also|References|Warnings?|Usage)\s*:?$"
)
_NOT_PROSE = re.compile(r"^(>>>|\.\.|:\w+|[-=~*#`|+<>$@]{2}|[-*•] |\d+[.)] |@)")


def prose(doc: str) -> list[str]:
    """The paragraphs of a documentation string that are sentences, as plain text in one line each.

    Headings of sections and what stands under Parameters and the like are left out, and so are examples and
    tables. The first paragraph of a section Returns is kept, with that word before it.
    """
    found: list[str] = []
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
        elif section or (found and all(line.startswith("  ") for line in lines)):  # indented: an example
            continue
        if is_prose(text):
            found.append(text)
    return found


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
