"""A run's end in lines for people, from its record. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from podtune.run.record import Json, Measurements, mapping, number


def summary_lines(record: Json, output_dir: Path) -> list[str]:
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
