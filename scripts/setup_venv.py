"""Make the virtual environment: pinned, hash-checked dependencies and podtune itself, editable.

    python scripts/setup_venv.py .venv

Only the standard library is used, because nothing is installed yet. A stamp of everything that decides the
content makes the second run a matter of milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements.txt"


def main() -> int:
    if sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)):
        return fail(
            f"Python 3.11, 3.12 or 3.13 is needed; this is {sys.version.split()[0]}: "
            "make setup PYTHON=python3.12"
        )
    venv = ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
    stamp, wanted = venv / ".podtune-stamp", fingerprint()
    if stamp.exists() and stamp.read_text() == wanted and (venv / "bin" / "podtune").exists():
        return 0
    started = time.monotonic()
    print(
        f"setup: making {venv.name} with Python {sys.version.split()[0]} (once; some minutes on a slow "
        "network)",
        flush=True,
    )
    uv = bootstrap(venv)
    env = dict(os.environ, VIRTUAL_ENV=str(venv), UV_PYTHON_DOWNLOADS="never", UV_NO_CONFIG="1")
    env.setdefault("UV_HTTP_TIMEOUT", "180")
    links = find_links()
    if links:  # uv does not read pip's settings
        env["UV_FIND_LINKS"] = ",".join(links)
    requirements = with_local_hashes(REQUIREMENTS, links, venv)
    into = ["--quiet", "--python", str(venv / "bin" / "python")]
    subprocess.run([uv, "pip", "sync", *into, "--require-hashes", str(requirements)], check=True, env=env)
    subprocess.run(
        [uv, "pip", "install", *into, "--no-deps", "--no-build-isolation", "-e", str(ROOT)],
        check=True,
        env=env,
    )
    stamp.write_text(wanted)
    print(f"setup: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def fail(message: str) -> int:
    print(f"setup: {message}", file=sys.stderr)
    return 69


def fingerprint() -> str:
    """What decides the environment's content: the pins, the package's own metadata, the interpreter."""
    digest = hashlib.sha256()
    for path in (REQUIREMENTS, ROOT / "pyproject.toml", ROOT / "hatch_build.py", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{sys.version_info[:2]} {sys.base_prefix} {ROOT}".encode())
    return digest.hexdigest()


def bootstrap(venv: Path) -> str:
    """Create the environment and return a uv to fill it: the one on PATH, else the pinned one by pip."""
    uv = shutil.which("uv")
    if uv and subprocess.run([uv, "--version"], capture_output=True).returncode == 0:
        if not same_python(venv):
            subprocess.run(
                [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], check=True
            )
        return uv
    if same_python(venv) and (venv / "bin" / "uv").exists():
        return str(venv / "bin" / "uv")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True
    )
    if made.returncode:
        raise SystemExit(
            fail(
                f"this Python cannot make virtual environments ({made.stdout.strip()[:300]}): "
                "install uv or python3-venv"
            )
        )
    pinned = re.search(r"^uv==\S+ (?:\\\n\s+--hash=\S+ ?)+", REQUIREMENTS.read_text(), re.MULTILINE)
    assert pinned, "requirements.txt pins uv"
    only_uv = venv / "uv.txt"
    only_uv.write_text(pinned.group(0).rstrip("\\ \n") + "\n")
    subprocess.run(
        [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--require-hashes", "-r", only_uv],
        check=True,
    )
    return str(venv / "bin" / "uv")


def same_python(venv: Path) -> bool:
    """True if ``venv`` is there with this interpreter, so that only what changed need be installed."""
    asked = [str(venv / "bin" / "python"), "-c", "import sys; print(sys.version_info[:2], sys.base_prefix)"]
    try:
        return (
            subprocess.run(asked, capture_output=True, text=True).stdout.strip()
            == f"{sys.version_info[:2]} {sys.base_prefix}"
        )
    except OSError:
        return False


def find_links() -> list[str]:
    """The wheel folders and pages that pip's configuration points to."""
    value = os.environ.get("PIP_FIND_LINKS", "")
    if not value:
        for section in ("install", "global"):
            asked = subprocess.run(
                [sys.executable, "-m", "pip", "config", "get", f"{section}.find-links"],
                capture_output=True,
                text=True,
            )
            value = value or asked.stdout
    return [link for link in value.split() if "://" in link or Path(link).is_dir()]


def with_local_hashes(requirements: Path, links: list[str], venv: Path) -> Path:
    """Requirements that also admit the wheels in local folders of ``links``, by the hash of the file itself.

    A machine's owner puts another build of a pinned version there (torch 2.13.0+cpu for torch 2.13.0); its
    hash cannot be in the compiled list. Wheels behind an address keep the list as it is.
    """
    text = requirements.read_text()
    added = 0
    for wheel in sorted(w for link in links if Path(link).is_dir() for w in Path(link).glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        pin = re.compile(
            rf"^({re.escape(name.replace('_', '-'))}==)({re.escape(version.split('+')[0])})( "
            r".*\\)$",
            re.MULTILINE | re.IGNORECASE,
        )
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest not in text:
            text, found = pin.subn(rf"\g<0>\n    --hash=sha256:{digest} \\", text, count=1)
            added += found
    if not added:
        return requirements
    print(f"setup: {added} wheels from {', '.join(links)} admitted", flush=True)
    local = venv / "requirements.local.txt"
    local.write_text(text)
    return local


if __name__ == "__main__":
    raise SystemExit(main())
