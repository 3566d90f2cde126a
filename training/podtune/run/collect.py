"""A copy of a run's record in its log, which outlives the pod: printed, and found again. Needs no torch.

Logs of several pods come merged, prefixed, with timestamps, with other programs' lines in between, cut off by
rotation. A record is accepted only if its bytes have the SHA-256 and the length that its begin line states;
nothing is ever guessed at. That makes it exact, not genuine: who can write into a log can print a record.
"""

from __future__ import annotations

import fileinput
import hashlib
import json
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from podtune.run.errors import MARKER, warn
from podtune.run.record import SCHEMA, Json, finite

LINE_LENGTH = 4096  # container runtimes split lines at 16 KiB
MAX_BYTES = 4 * 2**20  # of a record's JSON
_BEGIN = re.compile(
    re.escape(MARKER)
    + r" begin ([0-9a-f]{12}) lines=(\d{1,6}) bytes=(\d{1,9}) sha256=([0-9a-f]{64})(?![0-9a-f])"
)
_LINE = re.compile(re.escape(MARKER) + r" ([0-9a-f]{12}) (\d{1,6}) ([A-Za-z0-9+/]{1,4096}={0,2})")
_TAGGED = re.compile(re.escape(MARKER) + r" (?:end )?([0-9a-f]{12})(?: |$)")


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
    # a line that another rank has not ended would hide the first marker
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

    header: tuple[int, int, str] | None = None  # lines, bytes, sha256
    chunks: dict[int, str] = field(default_factory=dict)
    contradict: bool = False  # there are two texts for one line


def collect(lines: Iterable[str]) -> Collection:
    """The records in ``lines`` of one or several logs. A record that was printed twice counts once."""
    by_tag: dict[str, _Parts] = {}
    collection = Collection()
    for line in _marker_lines(lines):
        if not _sort_in(line, by_tag):
            collection.damaged.append(DamagedRecord("unknown", "a marker line is cut off or broken"))
    for tag, parts in by_tag.items():
        try:
            record, digest = _assemble(parts)
            collection.records.append(record)
            collection.digests.append(digest)
        except ValueError as reason:
            collection.damaged.append(DamagedRecord(tag, str(reason)))
    return collection


def collect_files(paths: Iterable[Path]) -> Collection:
    """The records in files, read as one log; bytes that are not UTF-8 are replaced.

    Raises:
        OSError: a file that cannot be read.
    """
    with fileinput.input(paths, encoding="utf-8", errors="replace") as lines:
        return collect(lines)


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
        parts, header = by_tag.setdefault(match[1], _Parts()), (int(match[2]), int(match[3]), match[4])
        parts.contradict |= parts.header not in (None, header)
        parts.header = header
    elif match := _LINE.match(line):
        parts = by_tag.setdefault(match[1], _Parts())
        parts.contradict |= parts.chunks.setdefault(int(match[2]), match[3]) != match[3]
    elif match := _TAGGED.match(line):
        by_tag.setdefault(match[1], _Parts())
    else:
        return False
    return True


def _assemble(parts: _Parts) -> tuple[Json, str]:
    """The record of these lines and its digest.

    Raises:
        ValueError: it cannot be given back exactly; says why.
    """
    if parts.header is None:
        raise ValueError("its begin line is missing, broken or cut in two")
    count, size, digest = parts.header
    if size > MAX_BYTES:
        raise ValueError(f"it claims {size} bytes")
    if missing := count - sum(index < count for index in parts.chunks):
        raise ValueError(f"{missing} of its {count} lines are missing, or the log ends too early")
    if parts.contradict:
        raise ValueError("its lines are there twice with different texts: some are cut, or forged")
    content = _unpack("".join(parts.chunks[index] for index in range(count)), size)
    if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("its lines do not have its checksum: they were cut, wrapped or changed")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
    if schema != SCHEMA:
        raise ValueError(f"its schema is {str(schema)[:60]!r}, not {SCHEMA}")
    return record, digest


def _unpack(text: str, size: int) -> bytes:
    """What is packed in ``text``, never more than the announced ``size``; nothing if it is not whole."""
    inflater = zlib.decompressobj()
    try:
        # a byte more than announced: a bomb ends here, and a lie shows
        content = inflater.decompress(b64decode(text, validate=True), size + 1)
    except (ValueError, zlib.error):
        return b""
    return content if inflater.eof else b""
