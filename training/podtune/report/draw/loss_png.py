"""The picture of a run's losses that lies in its folder, drawn by matplotlib. No torch."""

from __future__ import annotations

import io
from pathlib import Path

from podtune.report.draw.plots import running_mean
from podtune.report.draw.tables import shown
from podtune.report.runs.runs import load_run
from podtune.run.files import replacing


def loss_curve_png(run_dir: Path, path: Path) -> bool:
    """Draw training and evaluation loss of one run with matplotlib; false without a file if it has none.

    Raises:
        UserError: there is no readable run in ``run_dir``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = load_run(Path(run_dir))
    train, evaluation = run.curve("train", "loss"), run.curve("eval", "loss")
    if not train[0] and not evaluation[0]:
        return False
    # without pyplot, which would keep the figure in a global list
    figure = Figure(figsize=(7.2, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = max(1, len(train[0]) // 50)
    if width > 1:
        axes.plot(*train, color="#93c5fd", linewidth=0.8, alpha=0.8)
    if train[0]:
        label = f"training, mean of {width} points" if width > 1 else "training"
        axes.plot(train[0], running_mean(train[1], width), color="#1d4ed8", linewidth=1.8, label=label)
    if evaluation[0]:
        axes.plot(*evaluation, color="#c2410c", linewidth=1.6, marker="o", markersize=4, label="evaluation")
        end = (evaluation[0][-1], evaluation[1][-1])
        axes.annotate(
            shown(end[1]), end, (-4, 9), textcoords="offset points", ha="right", color="#c2410c", fontsize=9
        )
    axes.margins(x=0.01)
    axes.legend(frameon=False)
    figure.suptitle(run.name, x=0.01, ha="left", fontsize=10, fontweight="bold")
    axes.set_title(run.one_line(), loc="left", fontsize=7, color="#57606a")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(color="#d8dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with replacing(path) as file:  # a link in its place is not followed
        file.buffer.write(picture.getvalue())
    return True
