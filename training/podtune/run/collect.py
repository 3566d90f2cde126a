"""Records found again in container logs: exactly as they were printed, or said to be missing or damaged.
Needs no torch.

Logs of several pods come merged, prefixed, with timestamps, with other programs' lines in between, wrapped,
cut off by rotation. A record is accepted only if its bytes have the SHA-256 and the length that its begin
line states; nothing is ever guessed at. The format is that of :func:`podtune.run.record.emit_record`.
"""

from __future__ import annotations

import binascii
import hashlib
import itertools
import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.run.record import LINE_LENGTH, MARKER, SCHEMA

MAX_BYTES = 64 * 2**20  # of a record's JSON; a begin line that claims more is not ours
MAX_TRIES = 256  # ways to put a record together, where lines with one number differ
_BEGIN = re.compile(
    re.escape(MARKER)
    + r" begin ([0-9a-f]{12}) lines=(\d{1,6}) bytes=(\d{1,9}) sha256=([0-9a-f]{64})(?![0-9a-f])"
)
_LINE = re.compile(re.escape(MARKER) + r" ([0-9a-f]{12}) (\d{1,6}) ([A-Za-z0-9+/]+={0,2})")
_END = re.compile(re.escape(MARKER) + r" end ([0-9a-f]{12})")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_NUMBERED = re.compile(re.escape(MARKER) + r" ([0-9a-f]{12})(?: |$)")


@dataclass(frozen=True)
class Damaged:
    """A record that was begun, or of which something is left, and that cannot be given back exactly."""

    tag: str
    reason: str

    def __str__(self) -> str:
        return f"record {self.tag}: damaged, {self.reason}"


@dataclass
class Collection:
    """What a log holds: ``records`` are exact, in the order in which they began; ``damaged`` names the
    others.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)


@dataclass
class _Parts:
    """What was found under one tag."""

    headers: set[tuple[int, int, str]] = field(default_factory=set)  # lines, bytes, sha256
    # every text seen for a line's number, complete or not
    chunks: dict[int, list[str]] = field(default_factory=dict)
    ended: bool = False


def collect(lines: Iterable[str]) -> Collection:
    """The records in ``lines`` of one or several logs. A record that was printed twice counts once."""
    found: dict[str, _Parts] = {}
    collection = Collection()
    for marker in _marker_lines(lines):
        if not _sort_in(marker, found):
            collection.damaged.append(Damaged("unknown", "a marker line is cut off or broken"))
    for tag, parts in found.items():
        content = _assemble(tag, parts)
        if isinstance(content, Damaged):
            collection.damaged.append(content)
        else:
            collection.records.append(content)
            collection.tags.append(tag)
    return collection


def collect_files(paths: Iterable[Path]) -> Collection:
    """The same for files, read as one log; bytes that are not UTF-8 are no obstacle.

    Raises:
        OSError: a file that cannot be read.
    """

    def lines() -> Iterator[str]:
        for path in paths:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file

    return collect(lines())


@dataclass
class _MarkerLine:
    """A line with the marker, and what stood at the ends of the lines after it: the rest of it, where a tool
    wrapped lines.
    """

    text: str
    continuations: list[str]


def _marker_lines(lines: Iterable[str]) -> Iterator[_MarkerLine]:
    current: _MarkerLine | None = None
    line = ""
    for line in lines:
        start = line.find(MARKER)
        if start < 0:
            if current is not None and len(current.continuations) < 2 * LINE_LENGTH // 40:
                current.continuations.append(line)
            continue
        if current is not None:
            yield current
        # two records printed at once without a line break between them
        pieces = line[start:].split(MARKER)[1:]
        for piece in pieces[:-1]:
            yield _MarkerLine(MARKER + piece, [])
        current = _MarkerLine(MARKER + pieces[-1].rstrip("\r\n"), [])
    if current is not None:
        yield current
    if any(line.endswith(MARKER[:length]) for length in range(4, len(MARKER))):
        yield _MarkerLine(line, [])  # the log ends inside a marker


def _sort_in(marker: _MarkerLine, found: dict[str, _Parts]) -> bool:
    """Put the line where it belongs; False if it belongs nowhere."""
    text = marker.text
    if match := _begin(marker):
        tag, count, size, digest = match
        parts = found.setdefault(tag, _Parts())
        if digest.startswith(tag) and count > 0 and size <= MAX_BYTES:
            parts.headers.add((count, size, digest))
    elif match_end := _END.match(text):
        found.setdefault(match_end[1], _Parts()).ended = True
    elif match_line := _LINE.match(text):
        texts = found.setdefault(match_line[1], _Parts()).chunks.setdefault(int(match_line[2]), [])
        for candidate in _whole_line(match_line[3], marker.continuations):
            if candidate not in texts:
                texts.append(candidate)
    elif numbered := _NUMBERED.match(text):
        found.setdefault(numbered[1], _Parts())
    else:
        return False
    return True


def _begin(marker: _MarkerLine) -> tuple[str, int, int, str] | None:
    """The begin line's values, also where it was wrapped: with one to three of the following lines' ends put
    back.
    """
    text = marker.text
    for rest in ["", *marker.continuations[:3]]:
        tail = rest.rstrip("\r\n").rsplit(None, 1)[-1:] if rest else [""]
        # the wrap may have fallen on a blank
        for joined in (text + "".join(tail), f"{text} {''.join(tail)}"):
            if match := _BEGIN.match(joined):
                return match[1], int(match[2]), int(match[3]), match[4]
        text += "".join(tail)
    return None


def _whole_line(start: str, continuations: list[str]) -> list[str]:
    """What the line may have been: as it stands, and with the ends of following lines while it is short of a
    full line.
    """
    candidates = [start]
    for line in continuations if len(start) < LINE_LENGTH else []:
        tail = line.split()[-1:]
        if tail and _BASE64.fullmatch(tail[0]) and len(candidates[-1]) + len(tail[0]) <= LINE_LENGTH:
            candidates.append(candidates[-1] + tail[0])
    return candidates


def _assemble(tag: str, parts: _Parts) -> dict[str, Any] | Damaged:
    if not parts.headers:
        return Damaged(tag, "its begin line is missing or broken")
    reason = ""
    for count, size, digest in parts.headers:
        missing = [index for index in range(count) if index not in parts.chunks]
        if missing:
            reason = f"{len(missing)} of its {count} lines are missing" + (
                "" if parts.ended else ": the log ends too early"
            )
            continue
        found = _try_all(parts, count, size, digest)
        if found is None:
            reason = "what its lines hold does not have its checksum"
            continue
        return _as_record(tag, found)
    return Damaged(tag, reason)


def _try_all(parts: _Parts, count: int, size: int, digest: str) -> bytes | None:
    """The bytes with the right checksum among the possible texts of the lines, if any."""
    options = []
    for index in range(count):
        texts = parts.chunks[index]
        if index < count - 1:  # every line but the last is full
            texts = [text for text in texts if len(text) == LINE_LENGTH]
        options.append(texts)
    for chosen in itertools.islice(itertools.product(*options), MAX_TRIES):
        content = _unpack("".join(chosen), size)
        if content is not None and hashlib.sha256(content).hexdigest() == digest:
            return content
    return None


def _unpack(text: str, size: int) -> bytes | None:
    try:
        inflater = zlib.decompressobj()
        # never more than was announced
        content = inflater.decompress(b64decode(text, validate=True), size + 1)
    except (binascii.Error, zlib.error):
        return None
    return content if inflater.eof and len(content) == size else None


def _as_record(tag: str, content: bytes) -> dict[str, Any] | Damaged:
    try:
        record = json.loads(content)
    except ValueError:
        return Damaged(tag, "it is not JSON")
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
        return Damaged(tag, f"its schema is {schema!r}, not {SCHEMA}")
    return record
