"""``--epochs``: training after the measurement, with the accuracy on the test split after every epoch."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from podtune.bench.case.data import Rows, open_test_rows, share
from podtune.bench.case.loop import measure
from podtune.bench.case.run import CaseRun
from podtune.bench.strategies.contract import Strategy
from podtune.run.errors import ConfigError
from podtune.run.record import Measurements, Training


def measure_and_train(run: CaseRun) -> Measurements:
    """Run one case: ``measurements`` of its record. A collective call; rank 0 has them all."""
    measured = measure(run)
    if not run.options.epochs or (measured.parity and measured.parity.status == "failed"):
        return measured
    return replace(measured, training=train(run))


def train(run: CaseRun) -> Training:
    """Train the case's model from its first weights on. A collective call.

    Raises:
        UserError: fewer rows than a batch.
    """
    options, world = run.options, run.world
    steps = options.epoch_steps or run.rows.rows // options.global_batch_size
    if not steps:
        raise ConfigError(
            f"{run.rows.rows} rows are less than one global batch of {options.global_batch_size}",
            where="--global-batch-size",
            fix="use fewer rows",
        )
    gc.collect()  # of the measurement, whose model is gone
    strategy = run.setup(options.strategy, world, options)
    test = open_test_rows(options, run.size)
    losses: list[float] = []
    seconds: list[float] = []
    accuracies: list[float] = []
    for epoch in range(options.epochs):
        started = time.perf_counter()
        losses.append(_epoch(run, strategy, range(epoch * steps, (epoch + 1) * steps)))
        seconds.append(time.perf_counter() - started)
        if test:
            accuracies.append(_accuracy(run, strategy, test))
        if world.is_main:
            right = f", accuracy {accuracies[-1]:.1%}" if test else ""
            print(f"epoch {epoch + 1} of {options.epochs}: loss {losses[-1]:.4f}{right}", flush=True)
    return Training(
        loss=losses[-1],
        loss_by_epoch=tuple(losses),
        seconds_by_epoch=tuple(seconds),
        accuracy=accuracies[-1] if test else None,
        accuracy_by_epoch=tuple(accuracies) if test else None,
    )


def _epoch(run: CaseRun, strategy: Strategy, steps: range) -> float:
    """The mean loss of the steps."""
    total = torch.zeros((), device=run.world.device)
    strategy.model.train()
    for step in steps:
        total += strategy.train_step(run.batch(strategy.rows, step).to(run.world.device))
    return float(total) / len(steps)


def _accuracy(run: CaseRun, strategy: Strategy, test: Rows) -> float:
    """The share of right answers over the whole split: classes of images, next tokens of texts.

    Ranks with the same logits count the same rows, which changes no share.
    """
    device, batch_size = run.world.device, run.options.global_batch_size
    counted = torch.zeros(2, device=device)
    strategy.model.eval()
    for step in range(math.ceil(test.rows / batch_size)):
        batch = run.batch(strategy.rows, step, test).to(device)
        logits = strategy.predict(batch)
        if logits is not None:
            # the last batch is filled up with the first rows again, since pipelines know one shape alone
            once = [number < test.rows for number in share(step, batch_size, *strategy.rows)]
            right = (logits.argmax(-1) == batch.targets)[torch.tensor(once, device=device)]
            counted += torch.stack([right.sum(), torch.tensor(right.numel(), device=device)])
    if dist.is_initialized():
        dist.all_reduce(counted)
    return float(counted[0] / counted[1])
