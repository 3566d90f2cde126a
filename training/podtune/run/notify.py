"""Notification of a web hook when a run ends. Needs no torch.

Nothing that happens here changes how the run ended: a failure is a warning.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from podtune.run.errors import ConfigError, warn
from podtune.run.follow import read_record
from podtune.run.record import Json, Measurements, finite, mapping, now, number

POST_S = 8.0
TOLD = ("name", "status", "exit_code", "reason", "started_at", "ended_at", "model", "strategy", "world_size")


class Notification:
    """The notification of a web hook at the end of this start of a run; made when it starts.

    A web hook's URL is a secret by itself: messages name its host alone.
    """

    def __init__(self, url: str, output_dir: Path) -> None:
        self._url, self._output_dir, self._began = url, output_dir, now()

    def send(self, code: int, error: BaseException | None = None) -> None:
        """Post the record that this start left; a failure before there was one has ``error`` to tell."""
        try:
            self._send(code, error)
        except Exception as problem:  # a record that somebody else damaged, say
            warn(f"notify_url: the notification failed: {type(problem).__name__}")

    def _send(self, code: int, error: BaseException | None) -> None:
        record = read_record(self._output_dir) or {}
        if str(record.get("ended_at", "")) < self._began:
            if error is None:  # a finished run was started again: nothing ran
                return
            record = {"name": self._output_dir.name, "status": "error", "exit_code": code}
            record |= {"reason": str(error)[:2000], "started_at": self._began, "ended_at": now()}
        post(self._url, told(record, self._output_dir))


def told(record: Json, output_dir: Path) -> Json:
    """Make the content to post: ``text`` for people, and the record without configuration and answers."""
    source, measured = record.get("provenance", {}), dict(record.get("measurements", {}))
    if "answers" in measured:
        measured["answers"] = {k: v for k, v in measured["answers"].items() if k != "samples"}
    text = "\n".join(summary_lines(record, output_dir))
    return (
        {"schema": "podtune.notification/1", "text": f"{record['name']}: {text}"}
        | {key: record[key] for key in TOLD if key in record}
        | {key: source[key] for key in ("job", "pod") if key in source}
        | {"output_dir": str(output_dir), "measurements": measured}
    )


def summary_lines(record: Json, output_dir: Path) -> list[str]:
    """Summarise a run for people."""
    measured, status = Measurements.read(record), record["status"]
    loss = measured.loss
    speed = f", {measured.tokens_per_s:,.0f} tokens/s" if measured.tokens_per_s is not None else ""
    if speed and measured.speeds_since_step:
        speed += f" since step {measured.speeds_since_step}"
    lines = [f"{status}: {measured.steps or 0} steps, {measured.tokens or 0:,} tokens{speed}"]
    if record["reason"]:
        lines.append(record["reason"])
    if loss and loss.eval_first is not None and loss.eval is not None:
        lines.append(f"eval loss {loss.eval_first:.4f} -> {loss.eval:.4f}")
    lines += answer_lines(measured.answers or {})
    if status == "ok":
        lines.append(f"model   {output_dir / 'final'}")
    lines.append(f"record  {output_dir / 'run.json'}, {output_dir / 'metrics.jsonl'}")
    return lines


def answer_lines(answers: Json) -> list[str]:
    """Exact match of base and tuned model on the held-out rows, beside what one fixed answer scores."""
    base, tuned = (number(mapping(answers.get(which)).get("exact_match")) for which in ("base", "tuned"))
    if base is None or tuned is None:
        return []
    line = f"answers {base:.1%} -> {tuned:.1%} of {answers.get('rows')} held-out rows exactly right"
    frequent = number(answers.get("most_frequent_answer"))
    return [line + (f"; the most frequent answer alone: {frequent:.1%}" if frequent is not None else "")]


def check_url(url: str, where: str) -> None:
    """Raise :class:`UserError` unless ``url`` is one that can be posted to; it is not printed."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
        parts.port  # noqa: B018 raises if it is no number
    except ValueError:
        good = False
    if not good or " " in url:
        raise ConfigError(
            "notify_url is not a web address", where=where, fix="https://HOST/PATH of a web hook"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refusal of redirects: a redirected POST would arrive as a GET without its content."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, content: Json) -> None:
    """POST ``content`` as JSON; over within POST_S seconds."""
    request = urllib.request.Request(
        url, json.dumps(finite(content)).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirect)
    failure = f"no answer within {POST_S:g} s"

    def attempt() -> None:
        nonlocal failure
        try:
            opener.open(request, timeout=POST_S).close()
            failure = ""
        except urllib.error.HTTPError as error:
            failure = f"HTTP {error.code}"
        except Exception as error:  # its text may hold the address
            failure = type(error).__name__

    # a name that is looked up, or an answer that trickles in, knows no timeout
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(POST_S)
    if failure:
        warn(f"notify_url: {urlsplit(url).hostname} was not notified of the run's end: {failure}")
