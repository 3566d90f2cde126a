"""A copy of a run's record in its log, which outlives the pod: printed, and found again. Needs no torch.

Logs of several pods come merged, prefixed, with timestamps, with other programs' lines in between, cut off by
rotation. A record is accepted only if its bytes have the SHA-256 and the length that its begin line states;
nothing is ever guessed at. That makes it exact, not genuine: who can write into a log can print a record.

Logs are not trusted: what one record, one line and one log may cost is bounded.
"""

from __future__ import annotations

import binascii
import hashlib
import itertools
import json
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from podtune.run.errors import MARKER, warn
from podtune.run.record import SCHEMA, Json, finite

LINE_LENGTH = 4096  # container runtimes split lines at 16 KiB
MAX_BYTES = 4 * 2**20  # of a record's JSON
MAX_LINES = 2 * MAX_BYTES // LINE_LENGTH
# of a tag; of a line's number; of ways to put a record together
MAX_HEADERS, MAX_TEXTS, MAX_TRIES = 4, 8, 256
MAX_UNPACKED = 64 * 2**20  # bytes tried over all records of a log
_BEGIN = re.compile(
    re.escape(MARKER)
    + r" begin ([0-9a-f]{12}) lines=(\d{1,6}) bytes=(\d{1,9}) sha256=([0-9a-f]{64})(?![0-9a-f])"
)
_LINE = re.compile(re.escape(MARKER) + r" ([0-9a-f]{12}) (\d{1,6}) ([A-Za-z0-9+/]{1,4096}={0,2})")
_END = re.compile(re.escape(MARKER) + r" end ([0-9a-f]{12})")
_NUMBERED = re.compile(re.escape(MARKER) + r" ([0-9a-f]{12})(?: |$)")


def emit_record(record: Json, stream: IO[str]) -> None:
    """Print the record between versioned markers, in short numbered lines with length and checksum.

    Format: a begin line with the id, the count of lines, the bytes of JSON and their SHA-256; the lines ``id
    index payload`` (zlib, base64); an end line with the id.
    """
    text = json.dumps(finite(record), ensure_ascii=False, separators=(",", ":"))
    content = text.encode(errors="backslashreplace")
    if len(content) > MAX_BYTES:
        warn(f"the record takes {len(content) / 2**20:.0f} MiB and is not printed; run.json has it")
        return
    digest = hashlib.sha256(content).hexdigest()
    packed = b64encode(zlib.compress(content, 9)).decode()
    chunks = [packed[start : start + LINE_LENGTH] for start in range(0, len(packed), LINE_LENGTH)]
    tag = digest[:12]
    lines = [f"{MARKER} begin {tag} lines={len(chunks)} bytes={len(content)} sha256={digest}"]
    lines += [f"{MARKER} {tag} {index} {chunk}" for index, chunk in enumerate(chunks)]
    lines.append(f"{MARKER} end {tag}")
    stream.write("\n" + "\n".join(lines) + "\n")
    stream.flush()


@dataclass(frozen=True)
class DamagedRecord:
    """A record that was begun, or of which something is left, and that cannot be given back exactly."""

    tag: str
    reason: str

    def __str__(self) -> str:
        return f"record {self.tag}: damaged, {self.reason}"


@dataclass
class Collection:
    """The records of a log: exact ones in the order in which they began, and the names of damaged ones."""

    records: list[Json] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # whole: a tag is twelve digits, which a forger can hit
    damaged: list[DamagedRecord] = field(default_factory=list)


@dataclass
class _Parts:
    """The lines found under one tag."""

    headers: set[tuple[int, int, str]] = field(default_factory=set)  # lines, bytes, sha256
    chunks: dict[int, list[str]] = field(default_factory=dict)  # every text seen for a line's number
    ended: bool = False


def collect(lines: Iterable[str]) -> Collection:
    """The records in ``lines`` of one or several logs. A record that was printed twice counts once."""
    by_tag: dict[str, _Parts] = {}
    collection = Collection()
    for line in _marker_lines(lines):
        if not _sort_in(line, by_tag):
            collection.damaged.append(DamagedRecord("unknown", "a marker line is cut off or broken"))
    unpacker = _Unpacker()
    for tag, parts in by_tag.items():
        assembled = _assemble(tag, parts, unpacker)
        if isinstance(assembled, DamagedRecord):
            collection.damaged.append(assembled)
        else:
            collection.records.append(assembled[0])
            collection.digests.append(assembled[1])
    return collection


def collect_files(paths: Iterable[Path]) -> Collection:
    """The records in files, read as one log; bytes that are not UTF-8 are replaced.

    Raises:
        OSError: a file that cannot be read.
    """

    def lines() -> Iterator[str]:
        for path in paths:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file

    return collect(lines())


def _marker_lines(lines: Iterable[str]) -> Iterator[str]:
    line = ""
    for line in lines:
        if (start := line.find(MARKER)) >= 0:
            # two records printed at once without a line break between them
            yield from (MARKER + piece.rstrip("\r\n") for piece in line[start:].split(MARKER)[1:])
    if any(line.endswith(MARKER[:length]) for length in range(4, len(MARKER))):
        yield line  # the log ends inside a marker


def _sort_in(line: str, by_tag: dict[str, _Parts]) -> bool:
    """Put the line where it belongs; False if it belongs nowhere."""
    if match := _BEGIN.match(line):
        tag, count, size, digest = match[1], int(match[2]), int(match[3]), match[4]
        headers = by_tag.setdefault(tag, _Parts()).headers
        fits = digest.startswith(tag) and 0 < count <= MAX_LINES and size <= MAX_BYTES
        if fits and len(headers) < MAX_HEADERS:
            headers.add((count, size, digest))
    elif match_end := _END.match(line):
        by_tag.setdefault(match_end[1], _Parts()).ended = True
    elif match_line := _LINE.match(line):
        texts = by_tag.setdefault(match_line[1], _Parts()).chunks.setdefault(int(match_line[2]), [])
        if len(texts) < MAX_TEXTS and match_line[3] not in texts:
            texts.append(match_line[3])
    elif numbered := _NUMBERED.match(line):
        by_tag.setdefault(numbered[1], _Parts())
    else:
        return False
    return True


def _assemble(tag: str, parts: _Parts, unpacker: _Unpacker) -> tuple[Json, str] | DamagedRecord:
    """The record of a tag and its digest, by the first of its begin lines that its content bears out."""
    if not parts.headers:
        return DamagedRecord(tag, "its begin line is missing, broken or cut in two")
    reason = ""
    for count, size, digest in parts.headers:
        missing = [index for index in range(count) if index not in parts.chunks]
        short = [index for index in range(count - 1) if not _full(parts.chunks.get(index, []))]
        if missing:
            reason = f"{len(missing)} of its {count} lines are missing"
            reason += "" if parts.ended else ": the log ends too early"
        elif short:
            reason = f"{len(short)} of its {count} lines are cut or were wrapped"
        elif (content := _try_all(parts, count, size, digest, unpacker)) is None:
            reason = "what its lines hold does not have its checksum"
        else:
            record = _as_record(tag, content)
            return record if isinstance(record, DamagedRecord) else (record, digest)
    return DamagedRecord(tag, reason)


def _full(texts: list[str]) -> list[str]:
    return [text for text in texts if len(text) == LINE_LENGTH]


def _try_all(parts: _Parts, count: int, size: int, digest: str, unpacker: _Unpacker) -> bytes | None:
    """The bytes with the right checksum among the possible texts of the lines, if any."""
    options = [_full(parts.chunks[index]) for index in range(count - 1)] + [parts.chunks[count - 1]]
    for chosen in itertools.islice(itertools.product(*options), MAX_TRIES):
        content = unpacker.unpack("".join(chosen), size)
        if content is not None and hashlib.sha256(content).hexdigest() == digest:
            return content
    return None


class _Unpacker:
    """Inflates at most :data:`MAX_UNPACKED` bytes in all."""

    def __init__(self) -> None:
        self.left = MAX_UNPACKED

    def unpack(self, text: str, size: int) -> bytes | None:
        """The ``size`` bytes packed in ``text``; None if they are not as many, or the budget is spent."""
        self.left -= size + len(text)
        if self.left < 0:
            return None
        try:
            inflater = zlib.decompressobj()
            # never more than was announced
            content = inflater.decompress(b64decode(text, validate=True), size + 1)
        except (binascii.Error, zlib.error):
            return None
        return content if inflater.eof and len(content) == size else None


def _as_record(tag: str, content: bytes) -> Json | DamagedRecord:
    try:
        record: Any = json.loads(content)
    except (ValueError, RecursionError):
        return DamagedRecord(tag, "it is not JSON")
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
        return DamagedRecord(tag, f"its schema is {str(schema)[:60]!r}, not {SCHEMA}")
    return record
