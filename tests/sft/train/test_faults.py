"""What happens to a run when something goes wrong (the numbers are those of the fault table in
docs/how-it-is-built.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import Bomb
from support.launch import Launcher, Program, metrics
from support.row_ledger import FOLDER, epochs, trained

from podtune.run import checkpoint
from podtune.run.background_save import stage_of
from podtune.run.manifest import MANIFEST, flushed_files, read_manifest
from podtune.run.record import Measurements

STEPS = 12
LONG = 4000  # steps that no test waits for


@pytest.fixture(scope="module")
def options(qa_data: Path, micro_model: Path) -> list[object]:
    """Short fp32 steps that log every one and save every fourth."""
    words = [
        "--model_name_or_path",
        micro_model,
        "--dataset_name",
        qa_data / "train.parquet",
        "--global_batch_size",
        4,
    ]
    words += [
        "--bf16",
        "false",
        "--learning_rate",
        "1e-3",
        "--logging_steps",
        1,
        "--max_length",
        64,
        "--save_steps",
        4,
    ]
    return [*words, "--timeout_s", 60]


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, options: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps of one process without an interruption."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    launcher.run(*options, "--max_steps", STEPS, "--output_dir", run)
    return run


def record(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "run.json").read_text())
    return found


def wait_for_step(program: Program, step: int, last: int = LONG) -> None:
    program.wait_for(f"step {step:>{len(str(last))}}/{last}")


def wait_for_checkpoint(run: Path) -> None:
    """Until the first one is complete: it is written beside the next steps, which may be quicker."""
    deadline = time.monotonic() + 60
    while not checkpoint.checkpoints(run):
        assert time.monotonic() < deadline, f"no complete checkpoint in {run}"
        time.sleep(0.01)


@pytest.mark.parametrize(("sign", "bound_s"), [(signal.SIGKILL, 10), (signal.SIGSTOP, 8 + 35)])
def test_a_rank_that_is_killed_or_hangs_ends_the_others_within_the_bound(
    sign: signal.Signals, bound_s: int, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    program = launcher.start(
        *options, "--max_steps", LONG, "--timeout_s", 8, "--output_dir", tmp_path / "run", ranks=2
    )
    wait_for_step(program, 2)
    program.signal(sign, [1])
    program.ranks[0].join(bound_s)
    assert program.ranks[0].exitcode == 170, program.output()[-3000:]
    assert "another rank died or stopped answering" in program.output()
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["exit_code"]) == ("error", 170)
    program.kill()


@pytest.fixture
def two_pods() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, 10.199.0.1 and 10.199.0.2 on eth0."""
    pods = f"podtune-{os.getpid()}-0", f"podtune-{os.getpid()}-1"
    commands = [f"netns add {pod}" for pod in pods]
    commands += [f"link add eth0 netns {pods[0]} type veth peer name eth0 netns {pods[1]}"]
    for number, pod in enumerate(pods, 1):
        commands += [f"-n {pod} addr add 10.199.0.{number}/24 dev eth0", f"-n {pod} link set lo up"]
        commands += [f"-n {pod} link set eth0 up"]
    if shutil.which("ip") is None:
        pytest.skip("the program ip is not installed")
    try:
        for words in commands:
            if subprocess.run(["ip", *words.split()], capture_output=True).returncode:
                pytest.skip(f"only root can make networks, with a kernel that has them: ip {words}")
        yield pods
    finally:
        for pod in pods:
            subprocess.run(["ip", "netns", "del", pod], capture_output=True)


def test_a_network_that_is_cut_ends_both_sides_within_the_bound(
    two_pods: tuple[str, str], launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    words = [*options, "--max_steps", LONG, "--timeout_s", 4, "--output_dir", tmp_path / "run"]
    network = {"MASTER_ADDR": "10.199.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
    program = launcher.start(*words, ranks=2, env=network, namespaces=two_pods)
    wait_for_step(program, 2)
    subprocess.run(["ip", "-n", two_pods[1], "link", "set", "eth0", "down"], check=True)
    assert program.wait(4 + 35) == [170, 170], program.output()[-3000:]
    assert all("another rank died or stopped answering" in log.read_text() for log in program.logs)


def test_a_second_ctrl_c_ends_a_process_without_a_launcher_at_once(launcher: Launcher) -> None:
    process = launcher.process(interrupted_twice)
    process.join(60)
    assert process.exitcode == -signal.SIGINT


def interrupted_twice() -> None:
    from podtune.sft.train.stop import StopSignals

    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.requested
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)


@pytest.mark.parametrize(("ranks", "struck"), [(1, [0]), (2, [0, 1]), (2, [1])])
def test_sigterm_to_any_rank_saves_one_checkpoint_and_ends_with_143(
    ranks: int, struck: list[int], launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    program = launcher.start(*options, "--max_steps", LONG, "--output_dir", tmp_path / "run", ranks=ranks)
    wait_for_step(program, 2)
    program.signal(signal.SIGTERM, struck)
    assert program.wait(60) == [143] * ranks, program.output()[-3000:]
    found, warnings = checkpoint.newest_complete(tmp_path / "run")
    assert found is not None
    assert warnings == []
    assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["exit_code"]) == ("preempted", 143)
    assert max(metrics(tmp_path / "run")) == found.step


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, []), (1, ["--packing", "--max_length", 96]), (2, []), (2, ["--strategy", "fsdp"])],
    ids=["one", "packed", "ddp", "fsdp"],
)
def test_an_interrupted_run_ends_bit_for_bit_like_one_that_was_not(
    ranks: int, words: list[object], launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ledgers = {run: {FOLDER: str(run.with_suffix(".ledger"))} for run in (whole, broken)}
    command = [*options, "--max_steps", STEPS, *words]
    launcher.run(*command, "--output_dir", whole, ranks=ranks, env=ledgers[whole])
    program = launcher.start(*command, "--output_dir", broken, ranks=ranks, env=ledgers[broken])
    wait_for_step(program, 4, STEPS)
    wait_for_checkpoint(broken)
    program.signal(signal.SIGKILL)
    program.wait(30)
    output = launcher.run(*command, "--output_dir", broken, ranks=ranks, env=ledgers[broken])
    assert "resuming from" in output
    assert "waits for its saves" not in output
    assert metrics(broken) == metrics(whole)
    assert metrics(broken, name="tokens") == metrics(whole, name="tokens")
    rows, expected = (trained(run.with_suffix(".ledger")) for run in (broken, whole))
    assert rows == expected
    assert sorted(rows) == list(range(ranks))
    assert all(sorted(steps) == list(range(1, STEPS + 1)) for steps in rows.values())
    assert all(set(each.values()) == {1} for each in epochs(broken.with_suffix(".ledger")))
    weights = "final/model.safetensors"
    assert (broken / weights).read_bytes() == (whole / weights).read_bytes()
    attempts = record(broken)["attempts"]
    assert isinstance(attempts, list)
    assert [attempt["from_step"] for attempt in attempts] in ([0, 4], [0, 8])
    first, second = Measurements.read(record(whole)), Measurements.read(record(broken))
    assert (second.loss, second.samples) == (first.loss, first.samples), "of all starts"
    assert (first.speeds_since_step, second.speeds_since_step) == (None, attempts[1]["from_step"])


def test_rows_in_the_order_of_their_length_stay_in_it_over_a_resume_in_the_second_epoch(
    launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    lines = [{"question": f"What is {n}?", "answer": f"{n} " * (1 + n % 9)} for n in range(20)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [*options, "--dataset_name", rows, "--train_sampling_strategy", "group_by_length"]
    words += ["--num_train_epochs", 2, "--save_steps", 2, "--output_dir", run]
    ledger = tmp_path / "ledger"
    launcher.run(*words, env={FOLDER: str(ledger)})
    whole = metrics(run)
    assert max(whole) == 10  # five steps an epoch
    for name in ("checkpoint-10", "final"):
        shutil.rmtree(run / name)
    (run / "run.json").unlink()
    assert "checkpoint-8" in launcher.run(*words, env={FOLDER: str(ledger)})
    assert metrics(run) == whole
    assert [(len(counted), counted.total()) for counted in epochs(ledger)] == [(20, 20)] * 2


def test_a_run_records_for_how_long_it_stopped_for_its_saves(undisturbed: Path) -> None:
    measured = record(undisturbed)["measurements"]
    assert isinstance(measured, dict)
    saves = measured["saves"]
    assert saves["n"] == 3
    assert 0 < saves["longest_stall_s"] <= saves["stall_s"] <= saves["write_s"]
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    said = [line["save_stall_s"] for line in lines if "save_write_s" in line]
    assert (
        1 <= len(said) <= 2
    )  # the first is complete before the second begins; the last follows the last line
    assert not stage_of(undisturbed, 0).exists()


def test_a_run_killed_while_it_saves_goes_on_from_a_complete_checkpoint(
    undisturbed: Path, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [*options, "--max_steps", STEPS, "--save_steps", 1, "--output_dir", run]
    for after in (1, 5, 9):
        program = launcher.start(*command)
        deadline = time.monotonic() + 60
        while not (run / checkpoint.SAVING / f"checkpoint-{after}").exists():
            assert time.monotonic() < deadline, program.output()[-3000:]
        program.signal(signal.SIGKILL)
        program.wait(30)
    launcher.run(*command)
    assert metrics(run) == metrics(undisturbed)
    assert (run / "final/model.safetensors").read_bytes() == (
        undisturbed / "final/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_after_its_last_checkpoint_trains_no_step_more(
    ranks: int, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [*options, "--max_steps", 4, "--output_dir", run]
    launcher.run(*command, ranks=ranks)
    whole, weights = metrics(run), (run / "final/model.safetensors").read_bytes()
    shutil.rmtree(run / "final")
    (run / "run.json").write_text(json.dumps(record(run) | {"status": "running"}))
    assert "checkpoint-4" in launcher.run(*command, ranks=ranks)
    assert metrics(run) == whole
    assert (run / "final/model.safetensors").read_bytes() == weights
    ended = record(run)
    assert isinstance(measured := ended["measurements"], dict)
    assert (ended["status"], measured["steps"], measured["loss"]["last"]) == ("ok", 4, whole[4])


def test_a_damaged_checkpoint_is_passed_over_and_kept(
    undisturbed: Path,
    launcher: Launcher,
    options: list[object],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    (run / "checkpoint-12" / "optimizer.pt").unlink()
    shutil.rmtree(run / "final")
    output = launcher.run(*options, "--max_steps", STEPS, "--output_dir", run)
    assert "checkpoint-12 is damaged (optimizer.pt is missing)" in output
    assert (run / "damaged-checkpoint-12").is_dir()
    assert metrics(run) == metrics(undisturbed)


def test_when_every_checkpoint_is_damaged_the_run_stops(
    undisturbed: Path,
    launcher: Launcher,
    options: list[object],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for step in (4, 8, 12):
        (run / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"rot")
    output = launcher.run(*options, "--max_steps", STEPS, "--output_dir", run, codes=[65])
    assert "every checkpoint is damaged" in output


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_a_checkpoint_that_would_run_code_is_refused_in_a_sentence(
    name: str, undisturbed: Path, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for later in ("final", "checkpoint-12"):
        shutil.rmtree(run / later)
    tampered = run / "checkpoint-8"
    torch.save({"state": Bomb(tmp_path / "exploded")}, tampered / name)
    manifest = read_manifest((tampered / MANIFEST).read_bytes(), tampered.name)
    (tampered / MANIFEST).unlink()  # who may write the volume may write it anew
    forged = replace(manifest, files=flushed_files(tampered)).text()
    (tampered / MANIFEST).write_text(forged)
    output = launcher.run(*options, "--max_steps", STEPS, "--output_dir", run, codes=[65])
    assert "checkpoint-8: loading its optimizer, scheduler or random state would call " in output
    assert "move it away" in output
    assert "Traceback" not in output
    assert not (tmp_path / "exploded").exists()
    assert record(run)["exit_code"] == 65


def test_a_changed_world_batch_or_schedule_is_refused_unless_asked_for(
    undisturbed: Path,
    launcher: Launcher,
    options: list[object],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    command = [*options, "--max_steps", STEPS + 2, "--output_dir", run]
    output = launcher.run(*command, ranks=2, codes=[78, 78])
    assert "world_size was 1 and is 2" in output
    assert "max_steps was 12 and is 14" in output
    assert output.count("belongs to another run") == 1  # said once, not by every rank
    launcher.run(*command, "--allow_resume_change", ranks=2)
    assert max(metrics(run)) == STEPS + 2


def test_a_finished_run_started_again_does_nothing(
    undisturbed: Path, launcher: Launcher, options: list[object]
) -> None:
    before = (undisturbed / "final" / "model.safetensors").stat().st_mtime_ns
    assert "is finished at step 12" in launcher.run(
        *options, "--max_steps", STEPS, "--output_dir", undisturbed
    )
    assert (undisturbed / "final" / "model.safetensors").stat().st_mtime_ns == before


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing_after_it(
    launcher: Launcher,
    options: list[object],
    tmp_path: Path,
) -> None:
    words = ["--learning_rate", "1e30", "--max_grad_norm", 0, "--save_steps", 1, "--max_steps", 8]
    output = launcher.run(*options, *words, "--output_dir", tmp_path / "run", ranks=2, codes=[65, 65])
    assert "not finite at step" in output
    stopped = int(output.split("not finite at step ")[1].split(";")[0])
    saved = checkpoint.checkpoints(tmp_path / "run")
    assert all(int(path.name.split("-")[1]) < stopped for path in saved)
    assert record(tmp_path / "run")["status"] == "error"


def test_rows_that_fill_no_batch_are_an_error_and_not_taken_for_a_preemption(
    micro_model: Path, launcher: Launcher, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "answer": "a"}\n')
    words = [
        "--model_name_or_path",
        micro_model,
        "--dataset_name",
        rows,
        "--output_dir",
        tmp_path / "run",
        "--dataloader_drop_last",
    ]
    output = launcher.run(*words, "--max_steps", 2, codes=[65])
    assert "1 rows fill no batch of 8" in output
    assert record(tmp_path / "run")["status"] == "error"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--report_to", "nosuch"], "report_to: 'nosuch' is not installed"),
        (["--use_peft", "--lora_target_modules", "nosuch"], "Target modules nosuch not found"),
        (["--attn_implementation", "flash_attention_2"], "FlashAttention2"),
        (["--model_init_kwargs", '{"nosuch": 1}'], "unexpected keyword argument 'nosuch'"),
        (["--eval_split_size", "100000"], "one part would be empty"),
    ],
)
def test_what_the_libraries_refuse_is_a_sentence_and_never_tried_again(
    words: list[str], says: str, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    program = launcher.start(*options, "--max_steps", 1, "--output_dir", tmp_path / "run", *words)
    assert 64 <= program.wait()[0] <= 78, program.output()[-3000:]
    assert says in program.output()
    assert "Traceback" not in program.output()


def test_a_start_that_died_before_its_first_checkpoint_stays_in_the_record(
    launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    program = launcher.start(*options, "--save_steps", LONG, "--max_steps", LONG, "--output_dir", run)
    wait_for_step(program, 1)
    program.kill()
    first = record(run)["started_at"]
    launcher.run(*options, "--max_steps", 1, "--output_dir", run)
    assert record(run)["started_at"] == first
    attempts = record(run)["attempts"]
    assert isinstance(attempts, list)
    assert [attempt["from_step"] for attempt in attempts] == [0, 0]


def test_a_picture_that_cannot_be_drawn_neither_fails_a_finished_run_nor_keeps_its_folder(
    launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "loss.png").mkdir(parents=True)
    assert "loss.png cannot be drawn" in launcher.run(*options, "--max_steps", 1, "--output_dir", run)
    assert (record(run)["status"], record(run)["exit_code"]) == ("ok", 0)
    assert "is finished" in launcher.run(*options, "--max_steps", 1, "--output_dir", run)


def test_two_jobs_in_one_folder_do_not_meet(
    launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    command = [*options, "--max_steps", LONG, "--output_dir", tmp_path / "run"]
    first = launcher.start(*command)
    wait_for_step(first, 1)
    assert "another job writes here" in launcher.run(*command, codes=[73])
    first.signal(signal.SIGTERM)
    assert first.wait(60) == [143]


@pytest.mark.parametrize("harm", ["template", "eos", "vocabulary"])
def test_a_tokenizer_that_cannot_train_says_what_to_set_and_nothing_is_written(
    harm: str, micro_model: Path, launcher: Launcher, options: list[object], qa_data: Path, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = tmp_path / "model"
    shutil.copytree(micro_model, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    if harm == "eos":
        del settings["eos_token"]
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        expected = "--eos_token"
    elif harm == "template":
        (model / "chat_template.jinja").unlink()
        expected = "--chat_template_path"
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
        expected = "embeddings"
    pq.write_table(
        pa.table(
            {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 9}
        ),
        tmp_path / "m.parquet",
    )
    pq.write_table(pa.table({"prompt": ["a"] * 9, "completion": ["b"] * 9}), tmp_path / "p.parquet")
    words = [
        "--dataset_name",
        tmp_path / ("p.parquet" if harm == "eos" else "m.parquet"),
        "--model_name_or_path",
        model,
    ]
    program = launcher.start(*options, "--max_steps", 2, *words, "--output_dir", tmp_path / "run")
    (code,) = program.wait(60)
    assert 64 <= code <= 78, program.output()[-3000:]
    assert expected in program.output()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    launcher: Launcher,
    options: list[object],
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    output = launcher.run(*options, "--max_steps", 2, "--output_dir", tmp_path / "file" / "run", codes=[73])
    assert "cannot be written" in output


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    volume = tmp_path / "volume"
    volume.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", volume], capture_output=True
    ).returncode:
        pytest.skip("only root can mount a small volume")
    yield volume
    subprocess.run(["umount", volume], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_a_sentence_and_keeps_the_checkpoints(
    small_volume: Path, launcher: Launcher, options: list[object]
) -> None:
    program = launcher.start(*options, "--max_steps", LONG, "--output_dir", small_volume / "run")
    wait_for_step(program, 4)
    program.wait_for("step    5")
    filler = small_volume / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as stream:
        while True:
            stream.write(bytes(2**16))
    assert program.wait(60) == [74], program.output()[-3000:]
    assert "complete checkpoints are kept" in program.output()
    assert "Traceback" not in program.output()
    assert (record(small_volume / "run")["status"], record(small_volume / "run")["exit_code"]) == (
        "error",
        74,
    )
    filler.unlink()
    found, warnings = checkpoint.newest_complete(small_volume / "run")
    assert found is not None
    assert warnings == []


def test_qlora_without_a_gpu_says_so_at_once(
    launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    output = launcher.run(
        *options,
        "--max_steps",
        2,
        "--load_in_4bit",
        "--use_peft",
        "--output_dir",
        tmp_path / "run",
        codes=[69],
    )
    assert "need a GPU" in output


@pytest.mark.parametrize("repo", ["a file", "aim://127.0.0.1:9"])
def test_aim_that_cannot_be_written_costs_a_warning_and_nothing_else(
    repo: str, undisturbed: Path, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    target = repo if repo.startswith("aim:") else tmp_path / repo
    output = launcher.run(
        *options, "--max_steps", STEPS, "--output_dir", tmp_path / "run", "--aim_repo", target
    )
    assert "warning" in output
    assert metrics(tmp_path / "run") == metrics(undisturbed)


def test_an_interrupted_and_resumed_run_is_one_run_in_aim(
    launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager

    from podtune.run.aim.sync import sync

    command = [
        *options,
        "--max_steps",
        STEPS,
        "--output_dir",
        tmp_path / "run",
        "--aim_repo",
        tmp_path / "aim",
    ]
    program = launcher.start(*command)
    wait_for_step(program, 6, STEPS)
    program.signal(signal.SIGTERM)
    assert program.wait(60) == [143]
    launcher.run(*command)
    # what a busy machine's tracker may have left
    sync(tmp_path / "run", str(tmp_path / "aim"), follow=False, as_json=False)
    repo = Repo(str(tmp_path / "aim"))
    (run,) = repo.iter_runs()
    RepoIndexManager.get_index_manager(repo).index(run.hash)
    (loss,) = [
        metric
        for metric in run.metrics()
        if metric.name == "loss" and metric.context.to_dict() == {"subset": "train"}
    ]
    steps, (values, *_) = loss.data.items_list()
    assert dict(zip(steps, values, strict=True)) == pytest.approx(metrics(tmp_path / "run"))
