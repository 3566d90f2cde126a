"""What the libraries under the trainer refuse, as errors for people."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator

from podtune.run.errors import ConfigError, DataError, Unavailable


@contextlib.contextmanager
def refusals_as_sentences() -> Iterator[None]:
    """Turn what TRL, transformers and PEFT raise of arguments into errors for people."""
    try:
        yield
    except (ValueError, ImportError) as error:  # arguments that do not fit the model
        raise ConfigError(
            f"the trainer cannot be made: {' '.join(str(error).split())[:400]}", where="configuration"
        ) from error
    except ConnectionError as error:
        raise Unavailable(
            f"the hub cannot be reached: {' '.join(str(error).split())[:300]}",
            where="push_to_hub",
            fix="leave it off and upload final/ afterwards, or give the pod a network and HF_TOKEN",
        ) from error


@contextlib.contextmanager
def refused_pickles_as_sentences(checkpoint: str | None) -> Iterator[None]:
    """Turn torch's refusal of a pickle in ``checkpoint`` into an error for people; nothing of it has run."""
    try:
        yield
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL (\S+)", str(error))
        what = f"would call {called[1]}" if called else "cannot be read as tensors"
        raise DataError(
            f"loading its optimizer, scheduler or random state {what}, so it was refused and nothing ran",
            where=str(checkpoint),
            fix="find out who wrote it; move it away, and the same command resumes from the one before",
        ) from None
