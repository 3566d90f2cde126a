"""Podtune lint: jobs and runtimes before a cluster sees them.

Parsed by argparse, since the import of typer alone takes longer than a file may; the other commands see it
through the function that ``__getattr__`` makes of the same options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from podtune.run.errors import DATA, OK, UserError

NAMES = ("text", "json", "github", "sarif")
#: option -> what it takes (None: nothing), and its help
OPTIONS: dict[str, tuple[str | None, str]] = {
    "format": ("FORMAT", f"{', '.join(NAMES)}; github makes annotations of a pull request."),
    "ignore": ("CODES", "Rules to leave out: PT204,PT404."),
    "fail-on": ("SEVERITY", "error (the default), warning or never."),
    "fail-if-none": (None, "No job or runtime in the files is a failure, too."),
    "target": (
        "VERSIONS",
        "operator=1.9,trainer=2.1,kubernetes=1.34; without it any Trainer, 2.0 to 2.3.",
    ),
    "notes": (None, "Notes one by one; else those of a job share a line."),
    "config": ("FILE", "In place of the nearest .podtune-lint.yaml."),
    "explain": ("CODE", "A rule: what it means, with a bad and a good example."),
}
HELP = """Check PyTorchJob and TrainJob manifests and training runtimes: the CRD, the webhooks, what the API
server refuses in their pods, and the traps after that.

Needs no cluster. An error is refused by somebody, or certainly hangs or never ends whatever the script does.
Exit code 65 with errors (--fail-on), 66 for a file that cannot be read, else 0. A rule is silenced by
--ignore, by the annotation lint.podtune/ignore: "PT204: reason" on a job or pod template, or in
.podtune-lint.yaml."""
EXAMPLES = """Examples:
  podtune lint job.yaml deploy/ 'jobs/*.yaml'
  podtune render -f deploy/values/two-node.yaml | podtune lint -
  kustomize build overlays/prod | podtune lint - --fail-on warning --fail-if-none
  podtune lint deploy/ --format sarif > lint.sarif
  podtune lint job.yaml --target trainer=2.1,kubernetes=1.31
  podtune lint --explain PT104"""


def main(words: list[str]) -> int:
    """Run the command with the words after its name; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="podtune lint",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="*", metavar="FILE|DIR|-", help="Manifests; - reads stdin.")
    for name, (metavar, text) in OPTIONS.items():
        if metavar is None:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", metavar=metavar, default="", help=text)
    arguments = vars(parser.parse_args(words))
    return run(arguments.pop("files"), arguments)


def run(files: list[str], options: dict[str, Any]) -> int:
    """Lint ``files`` and print the verdict; returns the exit code."""
    from podtune.cluster.lint import check, output
    from podtune.cluster.lint.settings import codes, fail_on, settings
    from podtune.cluster.lint.sources import texts
    from podtune.cluster.lint.targets import parse

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is ASCII only
    if options["explain"]:
        from podtune.cluster.lint.explain import explanation

        print(explanation(options["explain"]))
        return OK
    form = options["format"] or "text"
    if form not in NAMES:
        raise UserError(f"--format is {form!r}", fix=f"use {', '.join(NAMES)}", code=2)
    if not files:
        raise UserError("nothing to lint", fix="podtune lint FILE, a directory, or - for stdin", code=2)
    chosen = settings(options["config"])
    ignore = chosen.ignore | codes([options["ignore"]], "--ignore")
    target = parse(options["target"]) if options["target"] else chosen.target
    threshold = fail_on(options["fail_on"], "--fail-on") if options["fail_on"] else chosen.fail_on
    sources, problems = texts(files)
    verdict = check.lint(sources, ignore=ignore, target=target)
    write: Callable[..., str] = output.FORMATS[form]
    _print(write(verdict, notes=options["notes"]) if form == "text" else write(verdict))
    for problem in problems[:-1]:
        print(f"podtune: error: {output.printable(str(problem).splitlines()[0])}", file=sys.stderr)
    if problems:
        raise problems[-1]
    if verdict.empty:
        names = output.printable(", ".join(files))
        print(f"podtune lint: no PyTorchJob, TrainJob or runtime in {names}", file=sys.stderr)
    errors = verdict.count("error") + (verdict.count("warning") if threshold == "warning" else 0)
    none = verdict.empty and (options["fail_if_none"] or chosen.fail_if_none)
    return DATA if none or (errors and threshold != "never") else OK


def _print(text: str) -> None:
    if not text:
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:  # head, or a pager that was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def __getattr__(name: str) -> Any:
    """``lint`` as a function that typer can show beside the other commands."""
    if name != "lint":
        raise AttributeError(name)
    import inspect

    import typer

    def lint(files: list[str] | None = None, **options: Any) -> None:
        code = run(files or [], options)
        if code:
            raise typer.Exit(code)

    keyword = inspect.Parameter.KEYWORD_ONLY
    files = typer.Argument(None, metavar="FILE|DIR|-", help="Manifests; - reads stdin.")
    parameters = [inspect.Parameter("files", keyword, default=files, annotation=list[str])]
    for option, (metavar, text) in OPTIONS.items():
        kind = bool if metavar is None else str
        default = typer.Option(kind(), f"--{option}", metavar=metavar, help=text)
        parameters.append(
            inspect.Parameter(option.replace("-", "_"), keyword, default=default, annotation=kind)
        )
    lint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    lint.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    lint.__doc__ = f"{HELP}\n\n\b\n{EXAMPLES}"
    return lint
