"""Make docs/images/compare.png: the compare page of two demo runs, as a browser shows it. Needs chromium.

make demo && make demo DEMO_ARGS='--name slower --learning_rate 3e-4' && make picture
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(demo: Path) -> int:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("compare_picture: needs chromium on PATH", file=sys.stderr)
        return 69
    target = ROOT / "docs" / "images" / "compare.png"
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "compare.html"
        podtune = Path(sys.executable).with_name("podtune")
        subprocess.run(
            [podtune, "compare", demo / "run", demo / "slower", "--html", page],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        flags += [f"--user-data-dir={folder}/profile", "--window-size=1100,1500", f"--screenshot={target}"]
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo")))
