"""Resident memory of a CPU run stays flat although each batch has another length."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource

import psutil
import pytest
import torch
from support.launch import Launcher
from transformers import TrainerCallback

from podtune.run.library_environment import set_library_environment
from podtune.sft.cpu.heap_trim import MICRO_BATCHES, HeapTrimCallback

LENGTHS = range(1, 601)
SETTLED = 300  # the caches are full


def grown_mib(callbacks: list[type[TrainerCallback]], results: multiprocessing.Queue[float]) -> None:
    """What 300 steps of as many lengths add to resident memory after the first 300: a matrix product in bf16
    each.
    """
    set_library_environment(threads=1)
    torch.set_num_threads(1)
    made = [callback() for callback in callbacks]
    for callback in made:
        callback.on_train_begin()
    process, weights = psutil.Process(), torch.randn(1024, 1024, dtype=torch.bfloat16)
    resident = []
    for length in LENGTHS:
        torch.nn.functional.linear(torch.ones(length, 1024, dtype=torch.bfloat16), weights)
        for callback in made:
            callback.on_step_end()
        resident.append(process.memory_info().rss)
    results.put((min(resident[-MICRO_BATCHES:]) - min(resident[SETTLED : SETTLED + MICRO_BATCHES])) / 2**20)


def test_steps_of_ever_new_lengths_do_not_add_up_in_memory(launcher: Launcher) -> None:
    # a process of its own: the caches' sizes are read once, when the first kernel is made
    results: multiprocessing.Queue[float] = launcher._context.Queue()
    process = launcher._context.Process(target=grown_mib, args=([HeapTrimCallback], results))
    process.start()
    assert results.get(timeout=120) < 120  # up to 55 were seen, and 165 to 285 without a bound on the caches
    process.join(60)


def pages_of_large_tensors(
    environment: dict[str, str], results: multiprocessing.Queue[tuple[int, int, int]]
) -> None:
    """Pages that the system hands out for ten tensors of 64 MiB, each freed before the next; MiB given back
    when training ends, and MiB that a tensor leaves behind for which the heap has no place.
    """
    os.environ |= environment
    torch.set_num_threads(1)
    heap, process = HeapTrimCallback(), psutil.Process()
    heap.on_train_begin()
    for left in reversed(range(20)):
        if left == 9:  # small ones have found their places between them
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    resident = process.memory_info().rss
    heap.on_train_end()
    after = process.memory_info().rss
    torch.ones(2**26)
    results.put((pages, (resident - after) >> 20, (process.memory_info().rss - after) >> 20))


@pytest.mark.parametrize("environment", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_large_tensors_take_the_memory_of_those_before_unless_somebody_set_glibc_up(
    launcher: Launcher, environment: dict[str, str]
) -> None:
    results = launcher._context.Queue()
    process = launcher._context.Process(target=pages_of_large_tensors, args=(environment, results))
    process.start()
    pages, given_back_mib, left_behind_mib = results.get(timeout=120)
    process.join(60)
    assert left_behind_mib < 8
    if environment:
        assert pages > 10 * 16384 / 2  # of 4 KiB
    else:
        assert pages < 16384
        assert given_back_mib >= 60


def test_where_the_c_library_is_not_glibc_nothing_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    heap = HeapTrimCallback()
    for _ in range(3 * MICRO_BATCHES):
        heap.on_step_end()
    assert heap.times == 0


def test_the_heap_is_trimmed_every_few_micro_batches_and_only_when_memory_has_grown() -> None:
    heap = HeapTrimCallback()
    for _ in range(3 * MICRO_BATCHES):
        heap.on_substep_end()
    assert heap.times == 1  # the first look; nothing has grown since
