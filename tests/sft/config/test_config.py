"""A configuration is merged in one order and a mistake in it is answered before anything is imported."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from support.launch import Launcher

from podtune.commands.manifests import chart_manifests
from podtune.pod.launch import rendezvous_s
from podtune.run.errors import ConfigError, UserError
from podtune.run.world import World
from podtune.sft.config import settings as config

NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "sft.yaml"
    path.write_text(text)
    return path


def test_the_command_line_beats_the_yaml_beats_the_environment(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "learning_rate: 5e-5\nnum_train_epochs: 2\n")
    environment = {"LEARNING_RATE": "1e-3", "EPOCHS": "7", "BATCH_SIZE": "4"}
    settings = config.read([*NEEDED, "--config", str(path), "--num-train-epochs=3"], environment)
    assert settings.values["learning_rate"] == 5e-5  # YAML reads it as text
    assert settings.values["num_train_epochs"] == 3.0
    assert settings.values["per_device_train_batch_size"] == 4
    assert settings.source["per_device_train_batch_size"] == "environment variable BATCH_SIZE"


def test_a_wrong_value_of_the_environment_names_its_variable() -> None:
    with pytest.raises(
        UserError, match=("environment variable EPOCHS: num_train_epochs is 'abc', not a number")
    ):
        config.read(NEEDED, {"EPOCHS": "abc"})


def test_variables_that_a_yaml_sets_count_as_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EPOCHS", "RUN_NAME"):
        monkeypatch.setenv(name, "")
    path = yaml_file(tmp_path, "env: {EPOCHS: 5, RUN_NAME: from-env}\nrun_name: from-yaml\n")
    settings = config.read([*NEEDED, "--config", str(path)])
    assert settings.values["num_train_epochs"] == 5.0
    assert settings.values["run_name"] == "from-yaml"


def test_a_bare_no_in_yaml_is_the_choice_no(tmp_path: Path) -> None:
    settings = config.read([*NEEDED, "--config", str(yaml_file(tmp_path, "save_strategy: no\n"))], {})
    assert settings.values["save_strategy"] == "no"


def test_flags_lists_and_negations_are_read_as_trl_reads_them() -> None:
    settings = config.read(
        [*NEEDED, "--packing", "--no_gradient_checkpointing", "--lora_target_modules", "q_proj", "v_proj"], {}
    )
    assert settings.values["packing"] is True
    assert settings.values["gradient_checkpointing"] is False
    assert settings.values["lora_target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--learning_rat", "1"], "did you mean 'learning_rate'"),
        (["--confg", "a.yaml"], "did you mean 'config'"),
        (["--max_seq_length", "128"], "use max_length"),
        (["--warmup_ratio", "0.1"], "use warmup_steps"),
        (["--learning_rate", "fast"], "not a number"),
        (["--learning_rate", "0"], "must be above 0"),
        (["--max_steps", "1.5"], "not a whole number"),
        (["--packing", "maybe"], "not true or false"),
        (["--strategy", "fdsp"], "did you mean 'fsdp'"),
        (["--lr_scheduler_type", "cosin"], "did you mean 'cosine'"),
        (["--strategy", "ddp", "--fsdp"], "configured by hand too"),
        (["--load_in_4bit"], "--use_peft"),
        (["--hub_strategy", "all_checkpoints"], "hub_strategy: end"),
        (["--fsdp_config", "{'version': }"], "not text or a JSON mapping"),
        (["--learning_rate", "inf"], "must be a finite number"),
        (["--weight_decay", "nan"], "must be a finite number"),
        (["--max_steps", "0"], "must be at least 1, or -1"),
        (["--max_steps", "-7"], "must be at least 1, or -1"),
        (["--dataset_name"], "--dataset_name needs a value"),
        (["--output_dir", "a", "b"], "takes one value and has 2: a, b"),
        (["--eval_split_size", "2.5"], "a whole number of rows"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config", "a.yaml", "b.yaml"], "--config takes one file and has 2: a.yaml, b.yaml"),
        (["--learning_rat", "1", "--max_seq_length", "8"], "'learning_rat'; did you mean 'learning_rate'?"),
        (["--learning_rat", "1", "--max_seq_length", "8"], "unknown key 'max_seq_length': use max_length"),
        (["--chat_template", "x"], "use chat_template_path"),
        (["--num_machines", "2"], "use torchrun's own arguments"),
        (["--accelerate_config", "fsdp2"], "use strategy"),
        (["--timeout_s", "0"], "timeout_s is 0.0: must be above 0"),
        (["--hub-token=hf_x"], "set HF_TOKEN"),
        (["--hub_token", "hf_x"], "set HF_TOKEN"),
        (["--max_eval_rows", "0"], "must be at least 1"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(words: list[str], complaint: str) -> None:
    argv = [*words, *NEEDED] if words == ["stray"] else [*NEEDED, *words]
    with pytest.raises(UserError) as caught:
        config.read(argv, {})
    assert complaint in str(caught.value)
    assert "hf_x" not in str(caught.value)
    assert 64 <= caught.value.code <= 78


@pytest.mark.parametrize("words", [["--deepspeed", "ds.json"], ["--strategy", "zero2"]])
def test_deepspeed_is_refused_with_what_shards_in_its_place(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="fsdp-grad-op") as caught:
        config.read([*NEEDED, *words], {})
    assert caught.value.code == 78


def test_words_that_trl_s_command_line_takes_are_taken() -> None:
    words = ["--max_length", "none", "--save_total_limit", "null", "--packing_strategy", "bfd-requeue"]
    words += ["--optim_target_modules", "attn", "mlp", "--ddp_timeout", "60"]
    values = config.read([*NEEDED, *words], {}).values
    assert (values["max_length"], values["save_total_limit"]) == (None, None)
    assert values["packing_strategy"] == "bfd_split"
    assert values["optim_target_modules"] == ["attn", "mlp"]
    assert values["timeout_s"] == 60


def test_there_is_one_default_timeout() -> None:
    from podtune.run.distributed import DEFAULT_TIMEOUT_S

    assert config.read(NEEDED, {}).value("timeout_s") == DEFAULT_TIMEOUT_S


def test_a_number_of_processes_that_were_not_started_is_refused() -> None:
    from podtune.sft.config.resolve import resolve

    with pytest.raises(UserError, match="num_processes is 8, and 1 processes were started"):
        resolve(config.read([*NEEDED, "--num_processes", "8"], {}), World())


def test_what_podtune_decides_itself_is_said_to_have_no_effect() -> None:
    from podtune.sft.config.resolve import resolve

    words = ["--logging_nan_inf_filter", "true", "--disable_tqdm", "false"]
    notes = resolve(config.read([*NEEDED, *words], {}), World()).notes
    assert "without effect: logging_nan_inf_filter, disable_tqdm" in notes


def test_a_misspelled_yaml_key_names_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "learning_rte: 1\n")
    with pytest.raises(UserError, match="did you mean 'learning_rate'") as caught:
        config.read([*NEEDED, "--config", str(path)], {})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "max_steps: " + "[" * 3000,
        "max_steps: " + "9" * 100_000,
        "".join(" " * depth + "a:\n" for depth in range(1500)),
        "a: &a [1]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")),
        "a: &a [*a]",
        "a: 2026-99-99",
    ],
    ids=["brackets", "digits", "depth", "aliases", "an anchor in itself", "a date"],
)
def test_hostile_yaml_costs_a_sentence_and_the_launcher_nothing(tmp_path: Path, text: str) -> None:
    path = yaml_file(tmp_path, text)
    with pytest.raises(ConfigError, match=r"sft\.yaml"):
        config.read(["--config", str(path)], {})
    assert rendezvous_s(["--config", str(path)]) == 600


@pytest.mark.parametrize("name", ["PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "PATH", "CC", "cxx"])
def test_a_yaml_cannot_set_what_decides_which_code_runs(tmp_path: Path, name: str) -> None:
    path = yaml_file(tmp_path, f"env: {{{name}: /shared/x}}\n")
    with pytest.raises(ConfigError, match=f"env sets {name}, which decides what code runs"):
        config.read([*NEEDED, "--config", str(path)], {})


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "learning_rate: 1\n  packing: [\n")
    with pytest.raises(UserError, match=r"sft.yaml:2:"):
        config.read([*NEEDED, "--config", str(path)], {})


def test_help_and_a_wrong_key_are_answered_without_torch(tmp_path: Path) -> None:
    probe = (
        "import sys, runpy; sys.argv = ['t', *sys.argv[1:]]\ntry: runpy.run_module('podtune.training', "
        "run_name='__main__')\n"
    )
    probe += "finally: print('torch' in sys.modules, 'pyarrow' in sys.modules)"
    for words, code in ((["--help"], 0), ([*NEEDED, "--learning_rat", "1"], 78)):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", probe, *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stderr
        assert done.stdout.splitlines()[-1] == "False False"
        assert time.monotonic() - started < 30  # for hangs; a quiet machine takes a tenth of a second


def test_the_list_of_keys_is_the_one_that_trl_has() -> None:
    from scripts.config_keys import config_keys

    committed = (Path(config.__file__).parent / "config_keys.json").read_text()
    assert committed == config_keys(), "run: python scripts/config_keys.py"


def test_choices_stand_in_the_record_by_their_value() -> None:
    from podtune.sft.config.resolve import resolve

    recorded = resolve(config.read(NEEDED, {}), World()).resolved()
    assert f"{recorded['lr_scheduler_type']}, {recorded['save_strategy']}" == "linear, steps"


def test_lora_settings_without_use_peft_are_said_to_have_no_effect() -> None:
    from podtune.run.world import World
    from podtune.sft.config.resolve import resolve

    assert (
        "lora_r without use_peft" in resolve(config.read([*NEEDED, "--lora_r", "4"], {}), World()).notes[-1]
    )
    assert "lora" not in resolve(config.read([*NEEDED, "--lora_r", "4", "--use_peft"], {}), World()).notes[-1]


@pytest.mark.parametrize(
    ("words", "train", "evaluation"),
    [
        ([], (64, None), (64, None)),
        (["--packing"], (None, "bfd"), (None, "bfd")),
        (["--packing", "--eval_packing", "false"], (None, "bfd"), (64, None)),
        (["--eval_packing", "true"], (64, None), (None, "bfd")),
        (["--dataset_kwargs", '{"skip_prepare_dataset": true}'], (None, None), (None, None)),
    ],
)
def test_packed_rows_are_not_cut_and_all_others_are(
    words: list[str], train: tuple[int | None, str | None], evaluation: tuple[int | None, str | None]
) -> None:
    from podtune.sft.config.resolve import resolve
    from podtune.sft.data.rows import packing_strategies
    from podtune.sft.data.tokenizer import TokenizeOptions

    training = resolve(config.read([*NEEDED, "--max_length", "64", *words], {}), World()).training
    for packing, expected in zip(packing_strategies(training), (train, evaluation), strict=True):
        options = TokenizeOptions.of(functools.partial(getattr, training), packed=bool(packing))
        assert (options.max_length, packing) == expected


@pytest.mark.parametrize(
    ("words", "world", "expected"),
    [
        (["--global_batch_size", "16"], 1, (8, 2)),
        (["--global_batch_size", "16"], 2, (8, 1)),
        (["--global_batch_size", "16", "--per_device_train_batch_size", "2"], 2, (2, 4)),
        (["--global_batch_size", "24", "--gradient_accumulation_steps", "3"], 2, (4, 3)),
        (["--global_batch_size", "14"], 1, (7, 2)),
    ],
)
def test_accumulation_is_solved_for_the_world(
    words: list[str], world: int, expected: tuple[int, int]
) -> None:
    from podtune.sft.config.strategy import solve_batch

    solved = solve_batch(config.read([*NEEDED, *words], {}), World(world_size=world))
    assert (solved["per_device_train_batch_size"], solved["gradient_accumulation_steps"]) == expected


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--global_batch_size", "15"], "use 14 or 16"),
        (["--global_batch_size", "16", "--per_device_train_batch_size", "3"], "one of 1, 2, 4, 8"),
        (["--global_batch_size", "16", "--gradient_accumulation_steps", "3"], "one of 1, 2, 4, 8"),
    ],
)
def test_an_uneven_split_is_refused_with_sizes_that_work(words: list[str], fix: str) -> None:
    from podtune.sft.config.strategy import solve_batch

    with pytest.raises(UserError) as caught:
        solve_batch(config.read([*NEEDED, *words], {}), World(world_size=2))
    assert fix in str(caught.value)


def test_what_is_set_before_torch_is_imported_follows_the_device_and_leaves_the_users_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from podtune.run.library_environment import set_library_environment

    for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    set_library_environment(threads=1)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    set_library_environment(threads=1)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_help_whose_reader_has_seen_enough_ends_quietly() -> None:
    command = [sys.executable, "-m", "podtune.training", "--help_all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()  # as `| head` does, only sooner
        assert program.stderr.read() == ""
        assert program.wait(timeout=60) == 0


def _imports_of_training() -> None:
    """Run in a process with training's imports done."""
    from peft.import_utils import is_bnb_available

    assert {"peft", "transformers.trainer", "podtune.sft.train.build"} <= set(sys.modules)
    assert not {"bitsandbytes", "torch._inductor.compile_fx"} & set(sys.modules)
    assert importlib.util.find_spec("bitsandbytes"), "hidden from who asks for it later"
    assert sys.modules["deepspeed"] is None
    assert not is_bnb_available(), "LoRA's layers would import it"


def test_training_imports_neither_deepspeed_nor_bitsandbytes_for_whole_weights(launcher: Launcher) -> None:
    process = launcher.process(_imports_of_training)
    process.join(60)
    assert process.exitcode == 0


def test_a_key_that_is_set_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "max_steps: 10\nlearning_rate: 1e-4\nmax_steps: 20\n")
    with pytest.raises(UserError, match="'max_steps' is set twice, in line 1 and in line 3"):
        config.read([*NEEDED, "--config", str(path)], {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("learning_rat: 3", "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ("learning_rate: fast", "learning_rate is 'fast', not a number"),
        ("answer_rows: -1", "answer_rows is -1: must be at least 0"),
    ],
)
def test_a_mistake_in_the_config_of_a_chart_s_values_is_found_before_a_pod_is_made(
    tmp_path: Path, line: str, says: str
) -> None:
    values = yaml_file(tmp_path, f"config: |\n  model_name_or_path: /models/m\n  {line}\n")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        chart_manifests([values], [], "run")
    assert caught.value.where == "config of the values"
