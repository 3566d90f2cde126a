"""Write training/podtune/sft/config/config_keys.json: the keys of TRL's dataclasses and ours, so that
checking needs no import of TRL.

python scripts/config_keys.py            # after a change of TRL or of RunArguments
"""

from __future__ import annotations

from pathlib import Path

from podtune.sft.config.resolve import config_keys

if __name__ == "__main__":
    target = (
        Path(__file__).resolve().parent.parent
        / "training"
        / "podtune"
        / "sft"
        / "config"
        / "config_keys.json"
    )
    target.write_text(config_keys(), encoding="utf-8")
    print(f"wrote {target}")
