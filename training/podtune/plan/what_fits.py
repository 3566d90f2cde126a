"""The largest batch of a fine-tune on one card: a table over models, cards and kinds of training."""

from __future__ import annotations

from podtune.plan.hardware import hardware_row
from podtune.plan.models import shape_of
from podtune.plan.plan import USABLE, estimate
from podtune.plan.setup import TrainingSetup
from podtune.plan.shapes import Checkpointing

MODELS = ("SmolLM2-135M", "Qwen3-0.6B", "Qwen3-1.7B", "SmolLM3-3B", "Llama-3.1-8B")
CARDS = ("L4", "A10", "L40S", "A100-80", "H100")
KINDS = {
    "LoRA": {"precision": "bf16", "lora_r": 16},
    "full": {"precision": "bf16-autocast"},
    "full, 8-bit Adam": {"precision": "bf16-autocast", "optimizer": "adamw-8bit"},
}
TOKENS, MOST = 1024, 512  # of a row; rows of a batch, beyond which nobody asks


def largest_batch(model: str, card: str, kind: str, checkpointing: Checkpointing = "none") -> int:
    """Rows of 1,024 tokens that a fine-tune of a :data:`KINDS` holds on ``card`` at once; 0 for none."""
    shape, memory_gib = shape_of(model, TOKENS), USABLE * hardware_row(card).memory_gib

    def fits(rows: int) -> bool:
        setup = TrainingSetup(
            shape,
            "single",
            1,
            batch_size=rows,
            activation_checkpointing=checkpointing,
            fused_head=True,
            **KINDS[kind],  # type: ignore[arg-type]
        )
        return estimate(setup).total_gib <= memory_gib

    low, high = 0, MOST + 1  # low fits, high does not or is not asked for
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_fits() -> list[tuple[str, ...]]:
    """Rows of a table: model, kind of training, and a cell a card: without checkpointing / with all of it."""
    levels: tuple[Checkpointing, ...] = ("none", "full")
    rows = []
    for model in MODELS:
        for kind in KINDS:
            cells = [[largest_batch(model, card, kind, level) for level in levels] for card in CARDS]
            shown = [" / ".join(map(_count, cell)) if any(cell) else "-" for cell in cells]
            rows.append((model, kind, *shown))
    return rows


def _count(rows: int) -> str:
    return f"{MOST}+" if rows == MOST else str(rows)
