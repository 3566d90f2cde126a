"""Wishes in English, each with the podtune command that does it.

The names of runs, files and namespaces are made up from two words; a name of eval never occurs in train, so
that the model has to copy it. tests/qa holds every command against the command line itself.
"""

from __future__ import annotations

from podtune.qa.row import EVAL_SHARE, Row, held_out, order_of

DESCRIPTION = (
    "Wishes in English and the podtune command for each; names are made up, and those of eval are new."
)

_FIRST = """
amber azure bold brave calm clear cold coral crisp dark deep early eager fair fast fine fresh gentle
glad gold grand green happy idle ivory keen kind late light lime long loud lucky mild misty neat new
noble old pale plain proud quick quiet rapid red ripe royal rusty sharp short shy silent silver slow
small smart soft solid steady still stone strong sunny sweet swift tall tidy tiny true vivid warm
west white wide wild wise young
"""
_SECOND = """
badger beach birch bird bison bridge brook canyon castle cedar cliff cloud comet crane creek crow
delta desert dove dune eagle elm falcon fern field finch fjord forest fox garden glacier grove gull
harbor hawk heron hill island lake lark lion lynx maple marsh meadow moon moose moss oak ocean olive
orchid osprey otter owl panda peak pine planet pond poplar puma rain raven reef ridge river robin
rock rose sand seal shore sky snow sparrow spring star stream summit swan tiger trail tulip tundra
valley wave willow wind wolf wood
"""
# command: wishes for it. {a} and {b} are names, {n} a number.
_WISHES: dict[str, tuple[str, ...]] = {
    "podtune status {a}": ("how is {a} doing?", "show the state of job {a}", "why does {a} not run?"),
    "podtune status {a} -n {b}": ("how is {a} in namespace {b} doing?", "show the state of {a} in {b}"),
    "podtune logs {a}": ("show the log of {a}", "what does {a} print?"),
    "podtune logs {a} --follow": ("follow the log of {a}", "keep showing what {a} prints"),
    "podtune logs {a} --all": ("show the logs of all pods of {a}", "what do all pods of {a} print?"),
    "podtune watch {a}": ("follow {a} until it ends", "watch {a}"),
    "podtune delete {a}": ("delete job {a}", "remove {a} from the cluster"),
    "podtune delete {a} -n {b}": ("delete job {a} in namespace {b}", "remove {a} from {b}"),
    "podtune submit -f {b}.yaml --name {a}": ("start {a} from {b}.yaml", "submit {b}.yaml as {a}"),
    "podtune submit -f {b}.yaml --name {a} --follow": ("start {a} from {b}.yaml and follow it",),
    "podtune submit -f {b}.yaml --name {a} --set distributed.nodes={n}": (
        "start {a} from {b}.yaml on {n} nodes",
        "submit {b}.yaml as {a} with {n} pods",
    ),
    "podtune render -f {a}.yaml": ("show the manifests of {a}.yaml", "render {a}.yaml"),
    "podtune render -f {a}.yaml --set distributed.nodes={n}": ("render {a}.yaml for {n} nodes",),
    "podtune lint {a}.yaml": ("check {a}.yaml", "is the manifest {a}.yaml right?", "lint {a}.yaml"),
    "podtune dry-run -f {a}.yaml --model tiny": ("try {a}.yaml here with a tiny model", "rehearse {a}.yaml"),
    "podtune dry-run -f {a}.yaml --model tiny --steps {n}": ("try {n} steps of {a}.yaml here",),
    "podtune data inspect --data {a}.jsonl --model {b}": (
        "what would be trained of {a}.jsonl with model {b}?",
        "show the tokens of {a}.jsonl for {b}",
    ),
    "podtune data prepare --data {a}.jsonl --model {b} --output cache": (
        "tokenise {a}.jsonl for {b} into cache",
        "prepare {a}.jsonl for model {b}",
    ),
    "podtune model info {a}": ("how large is the model {a}?", "what does {a} need in memory?"),
    "podtune model merge {a} --output {b}": ("merge the adapter {a} into {b}",),
    "podtune train --config {a}.yaml": ("fine-tune with {a}.yaml", "train {a}.yaml on one process"),
    "podtune train -n {n} --config {a}.yaml": ("train {a}.yaml on {n} processes",),
    "podtune generate {a}": ("talk with {a}", "chat with the model of {a}"),
    "podtune generate {a} --against {b}": ("ask {a} and {b} the same", "talk with {a} beside {b}"),
    "podtune generate {a} --input {b}.jsonl --output answers.jsonl": ("let {a} answer {b}.jsonl",),
    "podtune compare {a} {b}": ("which is better, {a} or {b}?", "compare {a} with {b}"),
    "podtune compare {a} {b} --html page.html": ("make a page that compares {a} with {b}",),
    "podtune runs {a}": ("list the runs in {a}", "which runs are there in {a}?"),
    "podtune runs --cluster -n {a}": ("list the jobs of namespace {a}", "which jobs run in {a}?"),
    "podtune aim-sync {a} --repo {b}": ("copy {a} into the Aim repository {b}", "show {a} in Aim at {b}"),
    "podtune collect {a}.log": ("get the record out of {a}.log", "what does {a}.log hold?"),
    "podtune bench report {a}": ("report the benchmark in {a}", "draw the charts of the sweep {a}"),
    "podtune doctor --cluster -n {a}": (
        "what does the cluster lack for namespace {a}?",
        "check {a} for jobs",
    ),
}


def questions(rows: int, seed: int) -> list[Row]:
    """At most ``rows`` wishes, each phrase equally often, in an order decided by hash."""
    phrases = [(command, wish) for command, wishes in _WISHES.items() for wish in wishes]
    names = [f"{first}-{second}" for first in _FIRST.split() for second in _SECOND.split()]
    sides = {side: [name for name in names if held_out(name, seed) is side] for side in (True, False)}
    every: dict[str, Row] = {}
    for number in range(rows):
        command, wish = phrases[number % len(phrases)]
        side = sides[order_of(seed, number) % EVAL_SHARE == 0]  # both names of a wish are new, or neither
        a, b = (side[order_of(seed, number, which) % len(side)] for which in "ab")
        values = {"a": a, "b": b, "n": 2 + order_of(seed, number, "n") % 15}
        question = wish.format(**values)
        every[question] = Row(question, command.format(**values), command.split()[1], a, group=a)
    return sorted(every.values(), key=lambda row: order_of(seed, row.question))
