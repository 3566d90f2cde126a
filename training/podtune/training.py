"""Supervised fine-tuning of a causal language model through TRL's SFTTrainer, on one process or many.

    torchrun --nproc-per-node 2 -m podtune.training --config sft.yaml --global_batch_size 32

Reads top to bottom: the configuration, the process group, the checks, the data, the model, the training, what
is saved. Whatever only rank 0 does stands under ``world.is_main`` or in ``on_main``. Nothing heavy is
imported before the configuration and the data are known to be good.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from podtune.machine.facts import cpu_threads
from podtune.run import checkpoint
from podtune.run.distributed import (
    World,
    cleanup_distributed,
    follow_launcher,
    note_end,
    on_main,
    peer_failure,
    read_world,
    setup_distributed,
)
from podtune.run.errors import OK, PREEMPTED, PeerLost, reader_left, report, working
from podtune.run.heartbeat import VolumeWatch, claim
from podtune.run.lock import Lock
from podtune.sft.config import settings as config
from podtune.sft.source import hub, object_store

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from podtune.run.notify import Notification
    from podtune.sft.config.resolve import Arguments
    from podtune.sft.source.model import Origin
    from podtune.sft.train.run import FineTune
    from podtune.sft.train.trainer import PodtuneTrainer, StopTogether


LEAVING_S = 5.0  # for a save in flight when another rank is lost
VOLUME_SLACK_S = 20.0  # beyond timeout_s: within it a volume may be slow


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code; every failure is a sentence and a code (see
    podtune.run.errors).
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help_all", "--help-all"} & set(argv):
        try:
            print(config.help_text(everything="all" in "".join(argv)), flush=True)
        except BrokenPipeError:
            reader_left()
        return OK
    follow_launcher()
    world, notification = World(), None
    try:
        world = read_world()
        settings = config.read(argv)
        notification = to_notify(settings, world)
        check_inputs(settings, world)
        use_cpu = bool(settings.values.get("use_cpu"))
        before_imports(world)
        if world.is_main:
            working("the configuration is sound; importing torch and reading model and data")
        world = setup_distributed(settings.value("timeout_s"), use_cpu=use_cpu)
        code = note_end(fine_tune(settings, world))
        if notification:
            notification.send(code)
        return code
    except Exception as error:
        # Nothing is tidied here: peers may sit in a collective, and the launcher ends them.
        reason = (peer_failure(error) if "torch" in sys.modules else None) or error
        code = report(reason, rank=world.rank)
        if notification:
            notification.send(code, reason)
        if world.device_type == "cuda" and world.backend:
            # Python's way out would wait in NCCL for the others
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code


def to_notify(settings: config.Settings, world: World) -> Notification | None:
    """Whom rank 0 tells how this start ends, if anybody."""
    if not world.is_main or not settings.value("notify_url"):
        return None
    from podtune.run.notify import Notification

    return Notification(str(settings.value("notify_url")), Path(settings.values["output_dir"]))


def check_inputs(settings: config.Settings, world: World) -> None:
    """Data set and output folder, before torch is imported. One process of each pod looks."""
    if world.local_rank == 0:
        if object_store.is_url(model := settings.values["model_name_or_path"]):
            object_store.fetch(model, unwanted=hub.UNWANTED)
        settings.sources.check()
        if world.is_main and (url := settings.values.get("publish")):
            object_store.check_writable(url)
        checkpoint.check_writable(Path(settings.values["output_dir"]))


def before_imports(world: World) -> None:
    """What libraries read from the environment when they are imported: threads, the device, how memory is
    allotted, and that they need not talk about it.
    """
    os.environ["OMP_NUM_THREADS"] = str(cpu_threads(world))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # each batch has another length, which leaves gaps in memory that comes in blocks of fixed size
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # oneDNN and torch's layer over it keep the kernels, with the memory that they work in, of the last 1,024
    # shapes each: more than a gigabyte where each batch has another length. Those of a small model, whose
    # lengths are rounded up (podtune.sft.train.trainer), fit in this.
    for capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(capacity, "256")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # a bar in a log is a hundred lines
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"accelerate|transformers|trl|torch\.distributed"
    )


def fine_tune(settings: config.Settings, world: World) -> int:
    """Everything after the process group is open; returns the exit code."""
    from podtune.sft.config.resolve import resolve
    from podtune.sft.model.load import architecture
    from podtune.sft.source.model import load_config, locate_model
    from podtune.sft.train.trainer import Stopped, StopTogether

    values = settings.values
    origin = locate_model(values["model_name_or_path"], values.get("model_revision"))
    model_config = load_config(origin, bool(values.get("trust_remote_code")))
    arguments = resolve(settings, world, architecture(model_config))
    with StopTogether() as stop, contextlib.ExitStack() as watching:
        loaded = load(arguments, origin, model_config, world, stop)
        if loaded is None:  # an earlier start finished it
            cleanup_distributed()
            return OK
        trainer, run = loaded.trainer, loaded.run
        if world.local_rank == 0:
            output_dir, limit_s = (
                Path(arguments.training.output_dir),
                arguments.run.timeout_s + VOLUME_SLACK_S,
            )
            watching.enter_context(VolumeWatch(output_dir, limit_s))
        try:
            check_space(trainer, world)
            trainer.train(resume_from_checkpoint=run.resume_path)
            finished = trainer.finished(stop.agreed)
            if finished:
                trainer.save_final(run.output_dir / "final", run.card(), origin.processor_files())
            run.measure(trainer)
            early = trainer.stopped_early()
        except Exception as error:
            lost = peer_failure(error)
            # a peer that is gone has others wait for this process
            trainer.leave_save(LEAVING_S if lost else arguments.run.timeout_s)
            run.failed(lost or error)
            if trainer.bucket:
                trainer.bucket.failed()
            raise
        publisher, bucket = trainer.publisher, trainer.bucket
        trainer.release()
        cleanup_distributed()
        unpublished = bucket.finish(final=finished) if bucket else ""
        if world.is_main:
            if finished:
                publisher.finished(run.output_dir / "final")
                with contextlib.suppress(Stopped), stop.at_once():
                    run.answer(
                        origin,
                        loaded.tokenizer,
                        count=arguments.run.answer_rows,
                        max_new_tokens=arguments.run.answer_max_new_tokens,
                        trust_remote_code=arguments.training.trust_remote_code,
                    )
            run.end("ok" if finished else "preempted", OK if finished else PREEMPTED, early)
            unpublished = (bucket.close() if bucket else "") or unpublished
        if unpublished and finished:
            raise not_published(run.output_dir, unpublished)
    return OK if finished else PREEMPTED


def not_published(output_dir: Path, reason: str) -> PeerLost:
    """A run that ended well on its volume and not where it is published: the volume may go with the pod."""
    return PeerLost(
        f"the model is trained and saved in {output_dir / 'final'}, but not all of it is published: "
        f"{reason}; the same command publishes it"
    )


def check_space(trainer: PodtuneTrainer, world: World) -> None:
    """Whether the volume holds the checkpoints, before the first step."""
    args = trainer.args
    if args.save_strategy != "no":
        on_main(
            world,
            lambda: checkpoint.check_space(
                Path(args.output_dir), trainer.checkpoint_bytes(), args.save_total_limit
            ),
        )


class Loaded(NamedTuple):
    """What a fine-tune works with."""

    trainer: PodtuneTrainer
    run: FineTune
    tokenizer: PreTrainedTokenizerBase


def load(
    arguments: Arguments, origin: Origin, model_config: PreTrainedConfig, world: World, stop: StopTogether
) -> Loaded | None:
    """Tokenizer, data, checkpoint and model, in the order in which a mistake costs least; None if nothing is
    left to do.
    """
    from podtune.sft.config.memory import foresee
    from podtune.sft.cpu.heap_trim import HeapTrimCallback
    from podtune.sft.data.rows import token_rows
    from podtune.sft.data.tokenizer import load_tokenizer
    from podtune.sft.model.load import load_model
    from podtune.sft.train.bucket import Bucket
    from podtune.sft.train.early import early_stopping
    from podtune.sft.train.run import FineTune, find_checkpoint, is_finished
    from podtune.sft.train.trainer import PodtuneTrainer

    training = arguments.training
    output_dir = Path(training.output_dir)
    tokenizer = load_tokenizer(origin, **arguments.tokenizer_options())
    # one process tokenises, the others wait for its cache
    rows = token_rows(
        arguments.sources,
        tokenizer,
        arguments.row_options(),
        vocabulary=int(model_config.get_text_config().vocab_size),
    )
    facts = arguments.resume_facts(rows.info.fingerprint)
    claims: list[Lock] = []
    # two jobs in one folder would ruin both
    on_main(world, lambda: claims.append(claim(output_dir)))
    bucket = None
    if url := arguments.run.publish:
        place = f"{url.rstrip('/')}/{arguments.name}"
        bucket = Bucket(place, output_dir, world, training.save_total_limit)
    resume = on_main(
        world,
        lambda: find_checkpoint(
            output_dir,
            facts,
            named=training.resume_from_checkpoint,
            auto_resume=arguments.run.auto_resume,
            allow_change=arguments.run.allow_resume_change,
            bucket=bucket,
        ),
    )
    if bucket:
        resume = bucket.share(resume, rows.info.fingerprint)
    asked = training.max_steps, training.num_train_epochs
    if resume and on_main(world, lambda: is_finished(output_dir, resume, *asked)):
        if world.is_main:
            print(
                f"{arguments.name} is finished at step {resume.step}: a higher max_steps with "
                "--allow_resume_change goes on"
            )
        if bucket and (unpublished := on_main(world, bucket.complete)):
            raise not_published(output_dir, unpublished)
        return None
    memory = foresee(arguments, origin, world, rows.lengths(training.max_length))
    if memory and world.is_main:
        print(memory.line(), flush=True)
    model = load_model(origin, **arguments.model_options())
    # applied here, SFTTrainer need not look again
    training.model_init_kwargs = training.chat_template_path = None
    run = FineTune(
        arguments.record(world, rows.info.to_json()),
        output_dir,
        world,
        rows,
        resume=resume,
        claims=claims,
        notes=[note for note in arguments.notes if not (memory and note.startswith("activation check"))],
        memory=memory,
        aim_repo=arguments.run.aim_repo,
    )
    trainer = PodtuneTrainer(
        model=model,
        args=arguments.training,
        train_dataset=rows.dataset(int(resume.facts.get("position", 0)) if resume else 0),
        eval_dataset=rows.eval,
        processing_class=tokenizer,
        peft_config=arguments.peft_config(model_config.model_type),
        callbacks=[
            *(run.progress, stop, *early_stopping(arguments.run)),
            *([HeapTrimCallback()] if world.device_type == "cpu" else []),
        ],
        world=world,
        meter=run.meter,
        facts=facts,
        tokens_before=run.tokens_before,
        lean=arguments.run.loss == "lean",
        async_save=arguments.run.async_save,
        bucket=bucket,
    )
    stop.trainer = trainer
    run.announce(trainer)
    return Loaded(trainer, run, tokenizer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before there is something to save: no traceback
    sys.exit(main())
