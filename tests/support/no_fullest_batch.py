"""podtune.training without the trial of the fullest batch."""

from podtune.sft.train import trainer
from podtune.training import main as train


def main(argv: list[str]) -> int:
    """Train as ``podtune.training`` does, with nothing tried."""
    trainer.try_fullest_batch = lambda _: "nothing was tried"
    return train(argv)
