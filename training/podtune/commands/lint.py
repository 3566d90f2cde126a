"""Podtune lint: jobs and runtimes before a cluster sees them.

Parsed by argparse, since the import of typer alone takes longer than a file may; the other commands see it
through the function that ``__getattr__`` makes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from podtune.run.errors import DATA, OK, IOFailed, UserError, reader_left

FORMATS = ("text", "json", "github", "sarif")
#: option -> what argparse is told of it
OPTIONS: dict[str, dict[str, Any]] = {
    "format": {
        "choices": FORMATS,
        "default": "text",
        "help": "Of the verdict; github makes annotations of a pull request.",
    },
    "ignore": {"metavar": "CODES", "default": "", "help": "Rules to leave out: PT204,PT404."},
    "fail-on": {
        "choices": ("error", "warning", "never"),
        "help": "What fails; error unless given.",
    },
    "fail-if-none": {"action": "store_true", "help": "No job or runtime in the files is a failure, too."},
    "target": {
        "metavar": "VERSIONS",
        "help": "operator=1.9,trainer=2.1,kubernetes=1.34; without it any Trainer, 2.0 to 2.4.",
    },
    "notes": {"action": "store_true", "help": "Notes one by one; else those of a job share a line."},
    "config": {"metavar": "FILE", "default": "", "help": "In place of the nearest .podtune-lint.yaml."},
    "explain": {"metavar": "CODE", "help": "A rule: what it means, with a bad and a good example."},
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
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


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
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name}", **option)
    given = parser.parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is ASCII only
    if given.explain:
        from podtune.cluster.lint.explain import explanation

        print(explanation(given.explain))
        return OK
    if not given.files:
        raise UserError("nothing to lint", fix="podtune lint FILE, a directory, or - for stdin", code=2)
    return _lint(given)


def _lint(given: argparse.Namespace) -> int:
    from podtune.cluster.lint import check, output
    from podtune.cluster.lint.settings import codes, settings
    from podtune.cluster.lint.sources import read_sources
    from podtune.cluster.lint.targets import parse

    chosen = settings(given.config)
    ignore = chosen.ignore | codes([given.ignore], "--ignore")
    target = parse(given.target) if given.target else chosen.target
    sources = read_sources(given.files)
    problems = sources.problems
    if problems and not sources.texts:
        raise problems[0]
    verdict = check.lint(sources.texts, ignore=ignore, target=target)
    notes = {"notes": given.notes} if given.format in output.TAKE_NOTES else {}
    _print(output.FORMATS[given.format](verdict, **notes))
    for problem in problems[:-1]:
        print(f"podtune: error: {output.printable(str(problem).splitlines()[0])}", file=sys.stderr)
    if problems:
        raise problems[-1]
    if sources.templates:
        names = output.printable(", ".join(sources.templates))
        print(
            f"podtune lint: left out, as templates are no YAML before they are filled in: {names}",
            file=sys.stderr,
        )
    if verdict.empty:
        names = output.printable(", ".join(given.files))
        print(f"podtune lint: no PyTorchJob, TrainJob or runtime in {names}", file=sys.stderr)
    threshold = given.fail_on or chosen.fail_on
    failures = verdict.count("error") + (verdict.count("warning") if threshold == "warning" else 0)
    none = verdict.empty and (given.fail_if_none or chosen.fail_if_none)
    return DATA if none or (failures and threshold != "never") else OK


def _print(text: str) -> None:
    if not text:
        return
    try:
        print(text, flush=True)
    except OSError as error:
        reader_left()  # what is left in the buffer would fail once more at the end
        if not isinstance(error, BrokenPipeError):  # head, or a pager that was left
            raise IOFailed(f"the findings cannot be written: {error.strerror}", where="stdout") from error


def __getattr__(name: str) -> Any:
    """``lint`` as a command of typer that hands its words on to ``main``."""
    if name != "lint":
        raise AttributeError(name)
    import typer

    def lint(context: Any) -> None:
        raise typer.Exit(main(context.args))

    lint.__annotations__["context"] = typer.Context
    return lint
