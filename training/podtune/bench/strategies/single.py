"""One process, no communication: the reference for every loss and every speed."""

from __future__ import annotations

from podtune.bench.strategies.contract import SetupContext
from podtune.bench.strategies.step import WholeModel, prepare


def setup(context: SetupContext) -> WholeModel:
    """The whole model and the whole batch here."""
    return WholeModel(context, prepare(context.build_model(), context))
