"""Supervised fine-tuning of a causal language model through TRL's SFTTrainer, on one process or many.

    torchrun --nproc-per-node 2 -m podtune.training --config sft.yaml --global_batch_size 32

:func:`main` reads the configuration and opens the process group; :func:`fine_tune` is the run, top to
bottom, and ends in this order: the last save, ``final/``, measurements, the process group, uploads, sample
answers, the record. Nothing heavy is imported before the configuration and the data are known to be good.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

from podtune.machine.facts import cpu_threads
from podtune.run import output_volume
from podtune.run.distributed import cleanup_distributed, setup_distributed
from podtune.run.errors import OK, PREEMPTED, reader_left, working
from podtune.run.exit import exit_after
from podtune.run.launcher import follow_launcher, note_end
from podtune.run.library_environment import import_peft, set_library_environment
from podtune.run.start_phases import begin, phase_ended
from podtune.run.world import World, read_world
from podtune.sft.config import settings as config
from podtune.sft.config.help import help_text
from podtune.sft.config.keys import Settings
from podtune.sft.source import copies, object_store


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code, see :mod:`podtune.run.errors`."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help_all", "--help-all"} & set(argv):
        return print_help(everything="all" in "".join(argv))
    follow_launcher()
    begin()
    world = World()
    try:
        world = read_world()
        settings = config.read(argv)
        if world.local_rank == 0:
            check_inputs(settings, is_main=world.is_main)
        traces = Path(settings.values["output_dir"]).absolute() / "nccl_trace_rank_"
        set_library_environment(cpu_threads(world), str(traces))
        with working("configuration read; importing torch, then model and data", shown=world.is_main):
            use_cpu = bool(settings.values.get("use_cpu"))
            world = setup_distributed(settings.value("timeout_s"), use_cpu=use_cpu)
        return note_end(fine_tune(settings, world))
    except Exception as error:
        return exit_after(error, world)


def print_help(*, everything: bool) -> int:
    """Print the options, or those of TRL too."""
    try:
        print(help_text(everything=everything), flush=True)
    except BrokenPipeError:
        reader_left()
    return OK


def check_inputs(settings: Settings, *, is_main: bool) -> None:
    """Check data and output folder before torch is imported; the first process of each pod does."""
    values = settings.values
    if object_store.is_url(model := values["model_name_or_path"]):
        copies.fetch(model)
    settings.sources.check()
    if is_main and (url := values.get("publish")):
        object_store.check_writable(url)
    output_volume.check_writable(Path(values["output_dir"]))


def fine_tune(settings: Settings, world: World) -> int:
    """Fine-tune, with the process group open, and return the exit code."""
    from podtune.sft.model.end_to_end import architecture
    from podtune.sft.source.model import load_config, locate_model

    values = settings.values
    origin = locate_model(values["model_name_or_path"], values.get("model_revision"))
    trusted = bool(values.get("trust_remote_code"))
    model_config = load_config(origin, trusted)
    quantized = values.get("load_in_4bit") or values.get("load_in_8bit")
    import_peft(quantized=bool(quantized or hasattr(model_config, "quantization_config")))

    with working("importing transformers and TRL", shown=world.is_main):
        from podtune.sft.config.resolve import continue_adapter, resolve
        from podtune.sft.data.rows import token_rows
        from podtune.sft.train.build import build_trainer
        from podtune.sft.train.early import stopped_early
        from podtune.sft.train.refusals import refused_pickles_as_sentences
        from podtune.sft.train.run import check_space
        from podtune.sft.train.run_folder import open_run
        from podtune.sft.train.stop import Interrupted, StopSignals

    phase_ended("imports")
    if origin.is_adapter:
        settings = continue_adapter(settings, origin)
    arguments = resolve(settings, world, architecture(model_config, trusted))
    tokenizer = arguments.load_tokenizer(origin)
    vocabulary = int(model_config.get_text_config().vocab_size)
    # one process tokenises, the others wait for its cache
    rows = token_rows(arguments.sources, tokenizer, arguments.training, arguments.run, vocabulary=vocabulary)
    phase_ended("data")
    with StopSignals() as signals, open_run(arguments, rows, world) as run:
        if run is None:  # an earlier start has finished it
            cleanup_distributed()
            return OK
        run.check_memory(arguments, origin)
        trainer = build_trainer(arguments, origin, model_config, tokenizer, run, signals)
        phase_ended("model")
        run.announce(trainer)
        check_space(trainer, world)
        with refused_pickles_as_sentences(run.resume_path):
            trainer.train(resume_from_checkpoint=run.resume_path)
        finished = trainer.finish()
        if finished:
            run.save_final(trainer, origin.processor_files())
        run.measure(trainer)
        trainer.release()
        cleanup_distributed()  # nobody waits for another rank from here on
        run.publish(trainer, finished=finished)
        if finished:
            with contextlib.suppress(Interrupted), signals.abandonable():
                run.compare_with_base(origin, tokenizer)
        run.end(finished=finished, early=stopped_early(trainer))
    return OK if finished else PREEMPTED


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before there is something to save: no traceback
    sys.exit(main())
