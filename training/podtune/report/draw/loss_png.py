"""The picture of a run's losses that lies in its folder, drawn by matplotlib. No torch."""

from __future__ import annotations

import io
from pathlib import Path

from podtune.report.runs.runs import load_run
from podtune.run.files import replacing


def loss_curve_png(run_dir: Path, path: Path) -> bool:
    """Draw training and evaluation loss of one run with matplotlib; false without a file if it has none.

    Raises:
        UserError: there is no readable run in ``run_dir``.
    """
    from matplotlib.figure import Figure

    run = load_run(run_dir)
    train, evaluation = run.curve("train", "loss"), run.curve("eval", "loss")
    if not train[0] and not evaluation[0]:
        return False
    # without pyplot, which would keep the figure in a global list
    figure = Figure(figsize=(7.2, 4.0), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*train, color="#1d4ed8", linewidth=1.2, label="training")
    axes.plot(*evaluation, color="#c2410c", linewidth=1.6, marker="o", markersize=4, label="evaluation")
    axes.legend(frameon=False)
    axes.set_title(f"{run.name}: {run.one_line()}", loc="left", fontsize=8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(color="#d8dee4", linewidth=0.6)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with replacing(path) as file:  # a link in its place is not followed
        file.buffer.write(picture.getvalue())
    return True
