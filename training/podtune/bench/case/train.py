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
from podtune.bench.case.saved import resume, save
from podtune.bench.options import Options
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
    done = (resume(strategy, options, world) if options.resume else None) or Training(0.0, (), ())
    for epoch in range(len(done.loss_by_epoch), options.epochs):
        started = time.perf_counter()
        loss = _epoch(run, strategy, epoch, steps)
        seconds = time.perf_counter() - started
        accuracy = _accuracy(run, strategy, test) if test else None
        done = Training(
            loss=loss,
            loss_by_epoch=(*done.loss_by_epoch, loss),
            seconds_by_epoch=(*done.seconds_by_epoch, seconds),
            accuracy=accuracy,
            accuracy_by_epoch=None if accuracy is None else (*(done.accuracy_by_epoch or ()), accuracy),
        )
        if options.save:
            save(strategy, done, options, world)
        if world.is_main:
            right = "" if accuracy is None else f", accuracy {accuracy:.1%}"
            print(f"epoch {epoch + 1} of {options.epochs}: loss {loss:.4f}{right}", flush=True)
    return done


def learning_rate(options: Options, step: int, steps: int) -> float:
    """The rate of ``step`` of ``steps``: linear up to the warm-up's end, then constant or half a cosine."""
    if step < options.lr_warmup:
        return options.learning_rate * (step + 1) / options.lr_warmup
    if options.lr_schedule == "constant":
        return options.learning_rate
    progress = (step - options.lr_warmup) / max(1, steps - options.lr_warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def _epoch(run: CaseRun, strategy: Strategy, epoch: int, steps: int) -> float:
    """Train an epoch of ``steps``; their mean loss."""
    total = torch.zeros((), device=run.world.device)
    strategy.model.train()
    for step in range(epoch * steps, (epoch + 1) * steps):
        for group in strategy.optimizer.param_groups:
            group["lr"] = learning_rate(run.options, step, run.options.epochs * steps)
        total += strategy.train_step(run.batch(strategy.rows, step).to(run.world.device))
    return float(total) / steps


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
