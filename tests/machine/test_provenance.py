"""Where a run came from is told without its secrets."""

from __future__ import annotations

import pytest

from podtune.machine.provenance import without_secrets


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["t", "--hub_token", "hf_x", "--seed", "1"], ["t", "--hub_token", "***", "--seed", "1"]),
        (["t", "--hub-token=hf_x"], ["t", "--hub-token=***"]),
        (["--wandb_api_key", "k", "--db_password", "p"], ["--wandb_api_key", "***", "--db_password", "***"]),
        (["--repo", "https://me:pw@host/x"], ["--repo", "https://***@host/x"]),
        (
            ["--eos_token", "<|end|>", "--max_new_tokens", "8"],
            ["--eos_token", "<|end|>", "--max_new_tokens", "8"],
        ),
        (["--hub_token", "--seed", "1"], ["--hub_token", "--seed", "1"]),
    ],
)
def test_tokens_passwords_and_keys_of_a_command_line_are_blanked(words: list[str], kept: list[str]) -> None:
    assert without_secrets(words) == kept
