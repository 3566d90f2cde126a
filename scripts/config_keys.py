"""Write what is generated from the keys of TRL's dataclasses and ours: config_keys.json, so that checking
needs no import of TRL, and deploy/training.schema.json, the same for editors.

    python scripts/config_keys.py            # after a change of TRL or of RunArguments
"""

from __future__ import annotations

import json
from pathlib import Path

from podtune.sft.config.resolve import config_keys

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "deploy" / "training.schema.json"

if __name__ == "__main__":
    target = ROOT / "training/podtune/sft/config/config_keys.json"
    target.write_text(config_keys(), encoding="utf-8")
    from podtune.sft.config.schema import json_schema  # reads what was just written

    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target} and {SCHEMA}")
