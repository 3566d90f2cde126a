"""One process, no communication: the reference for every loss and every speed."""

from __future__ import annotations

from podtune.bench.options import Options
from podtune.bench.strategies.contract import BuildModel, BuildOptimizer
from podtune.bench.strategies.step import Arithmetic, WholeModel, prepare
from podtune.run.world import World


def setup(
    build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
) -> WholeModel:
    """The whole model and the whole batch here."""
    model = prepare(build_model(), options, world.device)
    optimizer = build_optimizer(model.parameters())
    return WholeModel(model, optimizer, Arithmetic(options, world), options.accumulation)
