"""The launcher in a container's command, behind shells and wrappers, and words that cannot be executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh"}
#: programs that start the rest of their words; the number says how many words of their own follow the options
WRAPPERS = {
    **dict.fromkeys(("exec", "nohup", "time", "env", "stdbuf", "nice", "ionice", "setsid", "chrt"), 0),
    **dict.fromkeys(("tini", "dumb-init", "catatonit", "numactl", "nsys", "ncu", "--", "sudo", "command"), 0),
    **dict.fromkeys(("timeout", "taskset"), 1),
}
#: wrappers of two words, as in ``uv run torchrun``
RUNNERS = {"uv", "poetry", "pdm", "hatch", "conda", "mamba", "micromamba", "pixi", "rye"}
#: options of wrappers and runners that take the next word
VALUED = {"-n", "--name", "-p", "--prefix", "-u", "-s", "--signal", "-k", "-m", "-N", "-c", "-o", "-e", "-i"}
INITS = {"tini", "dumb-init", "catatonit"}
LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(("accelerate", "accelerate.commands.launch"), "accelerate"),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), "deepspeed"),
    **dict.fromkeys(("trl", "trl.cli"), "trl"),
    **dict.fromkeys(("podtune", "podtune.cli"), "podtune"),
    **dict.fromkeys(("mpirun", "mpiexec"), "mpirun"),
}
#: words of a shell that no image has a program of
BUILTINS = {"source", "export", "set", "ulimit", "alias", "unset", "trap", "eval", "."}
SHELL_COMMAND = 'command: ["sh", "-c", "..."]'
PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")
#: options of torchrun that stand alone; all others take a value
FLAGS = {"standalone", "no-python", "run-path", "use-env", "help", "module", "m", "h", "use-agent-store"}
#: options of python that take the next word
PYTHON_VALUED = {"-W", "-X", "--check-hash-based-pycs"}
NEVER_ENDS = re.compile(
    r"\bsleep\s+(inf|\d{6,})|\btail\s+-[fF]|\bwhile\s+(true|:|\[\s*1\s*\])|\bwatch\b|/dev/null\s*&?\s*$"
)

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
    commands: int = 1  # simple commands in that script
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
        if self.kind == "python":
            while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
                if words.pop(0) in PYTHON_VALUED and words:
                    words.pop(0)
            return {}, words
        if self.kind != "torchrun":
            return {}, []
        if "-m" in words and "".join(words[words.index("-m") + 1 :][:1]).startswith("torch.distributed."):
            words = words[words.index("-m") + 2 :]
        given: dict[str, str] = {}
        while words and words[0].startswith("-") and words[0] not in ("-m", "--module", "--"):
            name, equals, value = words.pop(0).lstrip("-").partition("=")
            name = name.replace("_", "-")
            if not equals and name not in FLAGS and words:
                value = words.pop(0)
            given[name] = value
        return given, words


def _name(path: str) -> str:
    """The last part of a path."""
    return path.rstrip("/").rpartition("/")[2]


@lru_cache(maxsize=256)
def launch_of(argv: tuple[str, ...]) -> Launch:
    """Find the launcher in a container's command, through a shell and the usual wrappers."""
    words, forwards = _unwrapped(list(argv))
    if words and _name(words[0]) in SHELLS:
        script = shell_script(words)
        if script is None:
            return Launch("", tuple(words))
        launch = _of_script(script)
        return replace(launch, swallows=False) if forwards else launch
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
    joined = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?.*?^\s*\1\s*$", "", script, flags=re.DOTALL | re.MULTILINE)
    simple = [part.strip() for part in re.split(r"\n|;|&&|\|\||\||&(?!>)", joined.replace("\\\n", " "))]
    simple = [part for part in simple if part and not part.startswith("#")]
    launches: list[tuple[Launch, bool]] = []
    for part in simple:
        part = re.sub(r"^(if|then|else|do|while|until|!|\(|\{)\s+", "", part).strip("() ")
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            words = part.split()
        launch = _of_words(_unwrapped(words)[0])
        if launch.kind and launch.program not in ("pip", "ensurepip", "venv"):
            launches.append((launch, bool(words) and words[0] == "exec"))
    if not launches:
        return Launch("", (), script, len(simple), False)
    # The training is the last launcher, or, where there is none but python, the last python.
    ours = [pair for pair in launches if pair[0].kind != "python"] or launches
    launch, replaced = ours[-1]
    # A shell given one simple command replaces itself by it; one that waits for a trap or a child passes on.
    swallows = not replaced and len(simple) > 1 and not re.search(r"\btrap\b", script)
    return replace(launch, script=script, commands=len(simple), swallows=swallows)


def _unwrapped(words: list[str]) -> tuple[list[str], bool]:
    """Drop leading wrappers and assignments: ``env A=1 tini -g -- torchrun`` starts ``torchrun``.

    The second value is True if an init that signals the whole group stands first.
    """
    start, forwards = 0, False
    while start < len(words):
        name = _name(words[start])
        if re.match(r"[A-Za-z_]\w*=", words[start]):
            start += 1
        elif name in WRAPPERS:
            forwards = (
                forwards or name == "dumb-init" or (name in INITS and "-g" in words[start + 1 : start + 4])
            )
            profiles = words[start + 1 : start + 2] in (["profile"], ["launch"])
            start = _past_options(words, start + 1 + profiles) + WRAPPERS[name]
        elif name in RUNNERS and "run" in words[start + 1 : start + 4]:
            start = _past_options(words, words.index("run", start) + 1)
        else:
            break
    return words[start:], forwards


def _past_options(words: list[str], start: int) -> int:
    while start < len(words) and words[start].startswith("-"):
        if words[start] == "--":
            return start + 1
        start += 2 if words[start] in VALUED else 1
    return start


def _of_words(words: list[str]) -> Launch:
    if not words:
        return Launch("", ())
    program = _name(words[0])
    if PYTHON.fullmatch(program):
        launch = Launch("python", tuple(words))
        after = [word for word in words[1:] if word == "-m" or not word.startswith("-")]
        module = after[1] if after[:1] == ["-m"] and len(after) > 1 else ""
        if not module:
            return launch if launch.program else Launch("", tuple(words))
        return Launch(LAUNCHERS.get(module, "python"), tuple(words))
    return Launch(LAUNCHERS.get(program, ""), tuple(words))


def variables(text: str) -> list[str]:
    """The variables that a word of a command names: ``$(RANK)`` of Kubernetes, ``$RANK`` of a shell."""
    return re.findall(r"\$[({]?([A-Za-z_]\w*)", text)


def expanded(text: str, env: Mapping[str, str], *, shell: bool) -> str | None:
    """``text`` with its variables, or None where one is not known."""
    pattern = r"\$\((\w+)\)|\$\{(\w+)\}|\$(\w+)" if shell else r"\$\((\w+)\)()()"
    missing = False

    def value(match: re.Match[str]) -> str:
        nonlocal missing
        name = match[1] or match[2] or match[3]
        missing = missing or name not in env
        return env.get(name, "")

    result = re.sub(pattern, value, text)
    return None if missing or "$" in result or "`" in result else result


@dataclass(frozen=True)
class WordFault:
    """A word of command and args that cannot be executed; not ``sure`` where the program may read it."""

    index: int  # in command and args together
    problem: str
    fix: str
    sure: bool = True


def word_faults(command: list[str], args: list[str]) -> Iterator[WordFault]:
    """Find words that are not the name of a program, and a shell's words where there is no shell."""
    words = [*command, *args]
    if not command:  # what the image's entry point makes of its arguments is its own
        if len(args) == 1 and _sentence(args[0]):
            what = f"{args[0][:60]!r} reaches the image's entry point as one word"
            yield WordFault(0, what, SHELL_COMMAND, sure=False)
        return
    first = words[0]
    if first != first.strip() and len(first.split()) == 1:
        yield WordFault(0, f"{first!r} begins or ends with a blank, so no program has this name", "remove it")
    elif _sentence(first):
        split = '", "'.join(first.split()[:3])
        fix = f'write each word by itself: ["{split}", ...]'
        yield WordFault(0, f"{first!r} is one word, and no program has this name", fix)
    elif first == "":
        yield WordFault(0, "the first word of the command is empty", "name the program")
    elif first in BUILTINS:
        yield WordFault(0, f"{first} is a word of the shell and no program", SHELL_COMMAND)
    if _name(first) in SHELLS:
        yield from _shell_faults(words)
        return
    launch = launch_of(tuple(words))
    script = launch.program
    several = re.search(r"\S\s+\S", script) is not None and not launch.script
    if several and script in words and "-c" not in words[: words.index(script)]:
        what = f"{script!r} is one word, and no script has this name"
        yield WordFault(words.index(script), what, "write each word by itself")
    alone = _name((_unwrapped(words)[0] or [""])[0]) not in {*SHELLS, ""}
    operator = next((word for word in words if word in ("&&", "||", "|", ";", ">", ">>", "2>&1")), "")
    if alone and operator:
        what = f"{operator!r} is handed on as a word: no shell reads it"
        yield WordFault(words.index(operator), what, SHELL_COMMAND, sure=False)


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
    parts = word.split()
    if len(parts) < 2:
        return False
    name = _name(parts[0])
    programs = {*SHELLS, *LAUNCHERS, *WRAPPERS, *RUNNERS, "tune", "echo", "sleep", "pip", "pip3"}
    if name in programs or PYTHON.fullmatch(name) or any(part.startswith("-") for part in parts[1:]):
        return True
    # a path may hold a blank
    return not word.startswith(("/", "./")) and any(part.endswith((".py", ".sh")) for part in parts[1:])
