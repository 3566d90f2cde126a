"""The launcher in a container's command, behind shells and wrappers, and words that cannot be executed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from podtune.cluster.lint.diagnostic import Severity

SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh"}
#: inits, which pass signals on to the program
INITS = {"tini", "dumb-init", "catatonit"}
#: programs that start the rest of their words, and those that take a word of their own before it
WRAPPERS = {
    *("exec", "nohup", "time", "env", "stdbuf", "nice", "ionice", "setsid", "chrt", "numactl", "nsys", "ncu"),
    *("--", "sudo", "command", "timeout", "taskset", *INITS),
}
TAKE_A_WORD = {"timeout", "taskset"}
#: wrappers of two words, as in ``uv run torchrun``
RUNNERS = {"uv", "poetry", "pdm", "hatch", "conda", "mamba", "micromamba", "pixi", "rye"}
#: options of wrappers and runners that take the next word
VALUED = {"-n", "--name", "-p", "--prefix", "-u", "-s", "--signal", "-k", "-m", "-N", "-c", "-o", "-e", "-i"}
LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(("accelerate", "accelerate.commands.launch"), "accelerate"),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), "deepspeed"),
    **dict.fromkeys(("trl", "trl.cli"), "trl"),
    **dict.fromkeys(("podtune", "podtune.cli"), "podtune"),
    **dict.fromkeys(("mpirun", "mpiexec"), "mpirun"),
}
#: words of a shell that no image has a program of
BUILTINS = {"source", "export", "set", "ulimit", "alias", "unset", "trap", "eval", ".", ""}
SHELL_COMMAND = 'command: ["sh", "-c", "..."]'
PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")
#: options of torchrun that stand alone; all others take a value
FLAGS = {"standalone", "no-python", "run-path", "use-env", "help", "module", "m", "h", "use-agent-store"}
#: options of python that take the next word
PYTHON_VALUED = {"-W", "-X", "--check-hash-based-pycs"}
#: a whole command that does nothing for ever
SLEEPS = re.compile(
    r"((\S*/)?(ba)?sh -\w*c )?(exec )?(\S*/)?(sleep inf(inity)?|sleep \d{7,}|tail -f /dev/null)"
)


@dataclass(frozen=True)
class Launch:
    """The start of a container's program.

    ``kind`` is a launcher's name, "python", or "" where that cannot be told.
    """

    kind: str
    argv: tuple[str, ...]  # of the launcher or python
    script: str = ""  # what a shell was given, if one is the first process
    swallows: bool = False  # a shell that passes no signal on stands between the container and the program

    @cached_property
    def options(self) -> dict[str, str]:
        """Torchrun's own options by name with dashes, up to the script or module."""
        return self._parsed[0]

    @cached_property
    def program(self) -> str:
        """The script or module that the processes run, or ""."""
        words = self._parsed[1]
        if words[:1] and words[0] in ("-m", "--module", "-c", "--"):
            words = words[1:]
        return words[0] if words else ""

    @cached_property
    def _parsed(self) -> tuple[dict[str, str], list[str]]:
        """The options before the program, and the words from the program on."""
        words = list(self.argv[1:])
        given: dict[str, str] = {}
        if self.kind not in ("python", "torchrun"):
            return given, []
        if "-m" in words and "".join(words[words.index("-m") + 1 :][:1]).startswith("torch.distributed."):
            words = words[words.index("-m") + 2 :]
        while words and words[0].startswith("-") and words[0] not in ("-m", "--module", "-c", "--"):
            word = words.pop(0)
            name, equals, value = word.lstrip("-").partition("=")
            takes = word in PYTHON_VALUED if self.kind == "python" else name.replace("_", "-") not in FLAGS
            if takes and not equals and words:
                value = words.pop(0)
            given[name.replace("_", "-")] = value
        return given, words


def _name(path: str) -> str:
    """The last part of a path."""
    return path.rstrip("/").rpartition("/")[2]


@lru_cache(maxsize=256)
def launch_of(argv: tuple[str, ...]) -> Launch:
    """Find the launcher in a container's command, through a shell and the usual wrappers."""
    words = _unwrapped(list(argv))
    if words and _name(words[0]) in SHELLS:
        script = shell_script(words)
        launch = Launch("", tuple(words)) if script is None else _of_script(script)
        return replace(launch, swallows=False) if _name(argv[0]) in INITS else launch
    return _of_words(words)


def shell_script(words: list[str]) -> str | None:
    """The script that ``sh -c`` was given, or None."""
    for index, word in enumerate(words[1:], start=1):
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word):
            rest = [word for word in words[index + 1 :] if not re.fullmatch(r"[-+][a-zA-Z]+|pipefail", word)]
            return rest[0] if rest else None
        if not re.fullmatch(r"[-+].*|pipefail|errexit|nounset|xtrace", word):
            return None
    return None


def _of_script(script: str) -> Launch:
    """The launcher that a shell's script starts: its last, or the last python where it is the only one."""
    joined = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?.*?^\s*\1\s*$", "", script, flags=re.DOTALL | re.MULTILINE)
    simple = [part.strip() for part in re.split(r"\n|;|&&|\|\||\||&(?!>)", joined.replace("\\\n", " "))]
    simple = [part for part in simple if part and not part.startswith("#")]
    found = Launch("", (), script)
    for part in simple:
        part = re.sub(r"^(if|then|else|do|while|until|!|\(|\{)\s+", "", part).strip("() ")
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            words = part.split()
        launch = _of_words(_unwrapped(words))
        weak = launch.kind == "python" and found.kind not in ("", "python")
        if not launch.kind or weak or launch.program in ("pip", "ensurepip", "venv"):
            continue
        # A shell given one simple command replaces itself by it; one with a trap passes signals on.
        swallows = words[:1] != ["exec"] and len(simple) > 1 and not re.search(r"\btrap\b", script)
        found = replace(launch, script=script, swallows=swallows)
    return found


def _unwrapped(words: list[str]) -> list[str]:
    """Drop leading wrappers and assignments: ``env A=1 tini -g -- torchrun`` starts ``torchrun``."""
    start = 0
    while start < len(words):
        name = _name(words[start])
        if re.match(r"[A-Za-z_]\w*=", words[start]):
            start += 1
        elif name in WRAPPERS:
            profiles = words[start + 1 : start + 2] in (["profile"], ["launch"])
            start = _past_options(words, start + 1 + profiles) + (name in TAKE_A_WORD)
        elif name in RUNNERS and "run" in words[start + 1 : start + 4]:
            start = _past_options(words, words.index("run", start) + 1)
        else:
            break
    return words[start:]


def _past_options(words: list[str], start: int) -> int:
    while start < len(words) and words[start].startswith("-"):
        if words[start] == "--":
            return start + 1
        start += 2 if words[start] in VALUED else 1
    return start


def _of_words(words: list[str]) -> Launch:
    program = _name(words[0]) if words else ""
    if not PYTHON.fullmatch(program):
        return Launch(LAUNCHERS.get(program, ""), tuple(words))
    launch = Launch("python", tuple(words))
    after = [word for word in words[1:] if word == "-m" or not word.startswith("-")]
    if after[:1] == ["-m"] and len(after) > 1:
        return replace(launch, kind=LAUNCHERS.get(after[1], "python"))
    return launch if launch.program else Launch("", tuple(words))


@dataclass(frozen=True)
class WordFault:
    """A word of command and args that cannot be executed; a warning where the program may read it."""

    index: int  # in command and args together
    problem: str
    fix: str
    severity: Severity = "error"


def word_faults(command: list[str], args: list[str]) -> Iterator[WordFault]:
    """Find words that are not the name of a program, and a shell's words where there is no shell."""
    words = [*command, *args]
    first = words[0] if words else ""
    if not command:  # what the image's entry point makes of its arguments is its own
        if len(args) == 1 and _sentence(first):
            what = f"{first[:60]!r} reaches the image's entry point as one word"
            yield WordFault(0, what, SHELL_COMMAND, "warning")
    elif _sentence(first):
        fix = f"write each word by itself: {json.dumps(first.split()[:3])}"
        yield WordFault(0, f"{first!r} is one word, and no program has this name", fix)
    elif first in BUILTINS:
        yield WordFault(0, f"{first!r} is not a program", SHELL_COMMAND)
    elif _name(first) in SHELLS:
        yield from _shell_faults(words)
    else:
        launch = launch_of(tuple(words))
        script = launch.program
        if len(script.split()) > 1 and script in words and "-c" not in words[: words.index(script)]:
            what = f"{script!r} is one word, and no script has this name"
            yield WordFault(words.index(script), what, "write each word by itself")
        operators = [word for word in words if word in ("&&", "||", "|", ";", ">", ">>", "2>&1")]
        if operators and not launch.script:
            what = f"{operators[0]!r} is handed on as a word: no shell reads it"
            yield WordFault(words.index(operators[0]), what, SHELL_COMMAND, "warning")


def _shell_faults(words: list[str]) -> Iterator[WordFault]:
    script = shell_script(words)
    if script is None:
        index = next((at for at, word in enumerate(words) if at and not word.startswith(("-", "+"))), 0)
        word = words[index]
        if index and (_sentence(word) or _name(word) in LAUNCHERS or PYTHON.fullmatch(word)):
            what = f"without -c a shell takes {word.splitlines()[0][:60]!r} for the name of a script"
            yield WordFault(index, what, "put -c before it")
        return
    at = len(words) - words[::-1].index(script)  # of the word after the script
    if at < len(words) and re.fullmatch(r"[\w./-]+", script) and not script.endswith(".sh"):
        what = f"sh -c takes the one word {script!r} as the command; what follows are not its arguments"
        yield WordFault(at, what, "write the whole command as one word after -c")


def _sentence(word: str) -> bool:
    """Several words in one, of which the first is a program that people start so."""
    first, *others = word.split() or [""]
    programs = {*SHELLS, *LAUNCHERS, *WRAPPERS, *RUNNERS, "tune", "echo", "sleep", "pip", "pip3"}
    if others and (_name(first) in programs or PYTHON.fullmatch(_name(first))):
        return True
    # a path may hold a blank
    script = not word.startswith(("/", "./")) and any(part.endswith((".py", ".sh")) for part in others)
    return script or any(part.startswith("-") for part in others)
