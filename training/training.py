"""Supervised fine-tuning of a causal language model through TRL's SFTTrainer, on one process or many.

    torchrun --nproc-per-node 2 -m training.training --config sft.yaml --global_batch_size 32

Reads top to bottom: the configuration, the process group, the checks, the data, the model, the training, what is saved.
Whatever only rank 0 does stands under ``world.is_main`` or in ``on_main``. Nothing heavy is imported before the
configuration and the data are known to be good.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # python training/training.py: let `training` mean the package, not this file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from training.run import checkpoint
from training.run.distributed import World, cleanup_distributed, main_first, on_main, peer_failure, read_world, setup_distributed
from training.run.errors import CANNOT_CREATE, OK, PREEMPTED, UserError, report
from training.run.heartbeat import claim
from training.run.threads import limit_threads
from training.sft import config, data

if TYPE_CHECKING:
    from training.run.checkpoint import Checkpoint
    from training.sft.build import Arguments
    from training.sft.trainer import PodtuneTrainer, StopTogether


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code; every failure is a sentence and a code (see training.run.errors)."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help_all"} & set(argv):
        print(config.help_text(everything="--help_all" in argv))
        return OK
    world = World()
    try:
        world = read_world()
        settings = config.read(argv)
        check_inputs(settings, world)
        limit_threads(world)
        world = setup_distributed(settings.values.get("timeout_s", 600.0), use_cpu=bool(settings.values.get("use_cpu")))
        return fine_tune(settings, world)
    except Exception as error:
        # No tidying of the process group here: peers may sit in a collective. The launcher ends them.
        if not isinstance(error, UserError) and "torch" in sys.modules:
            error = peer_failure(error) or error
        return report(error, rank=world.rank)


def check_inputs(settings: config.Settings, world: World) -> None:
    """Data set and output folder, before torch is imported. One process a pod looks."""
    if world.local_rank == 0:
        for source in data.sources(settings.values):
            data.check_source(source)
        checkpoint.check_writable(Path(settings.values["output_dir"]))


def fine_tune(settings: config.Settings, world: World) -> int:
    """Everything after the process group is open."""
    from training.sft.build import build
    from training.sft.trainer import StopTogether

    arguments = build(settings, world)
    output_dir = Path(arguments.training.output_dir)
    lock = on_main(world, lambda: claim(output_dir))
    with StopTogether() as stop:
        trainer, run, resume = load(arguments, world, stop)
        try:
            trainer.train(resume_from_checkpoint=str(resume.path) if resume else None)
        except BaseException as error:
            run.failed(error)
            raise
        finished = trainer.state.global_step >= trainer.state.max_steps
        if finished:
            save_final(trainer, world, output_dir / "final")
        run.measure(trainer)
    trainer.release()
    cleanup_distributed()
    if not world.is_main:
        return OK if finished else PREEMPTED
    if not finished:
        run.end("preempted", PREEMPTED, f"SIGTERM; saved at step {run.step}")
        return PREEMPTED
    run.answer(arguments)
    run.end("ok", OK)
    lock.release()
    return OK


def load(arguments: Arguments, world: World, stop: StopTogether) -> tuple[PodtuneTrainer, Any, Checkpoint | None]:
    """Tokenizer, data, checkpoint and model, in the order in which a mistake costs least."""
    from trl import get_peft_config, get_quantization_config

    from training.sft import model as models
    from training.sft.progress import Progress
    from training.sft.run import Run
    from training.sft.trainer import PodtuneTrainer

    training, name = arguments.training, arguments.model.model_name_or_path
    tokenizer = models.load_tokenizer(name, arguments.model.model_revision, training.trust_remote_code)
    with main_first(world):
        prepared = data.prepare(arguments, tokenizer)
    facts = resume_facts(arguments, world, prepared)
    resume = on_main(world, lambda: find_checkpoint(arguments, facts))
    quantization = get_quantization_config(arguments.model)
    model = models.load_model(arguments)
    run = Run(arguments, world, prepared, facts, resume)
    trainer = PodtuneTrainer(
        model=model,
        args=training,
        train_dataset=prepared.train,
        eval_dataset=prepared.eval,
        processing_class=tokenizer,
        peft_config=get_peft_config(arguments.model),
        callbacks=[run.progress, stop],
        world=world,
        facts=facts,
        lean=arguments.run.loss == "lean",
    )
    return trainer, run, resume
