"""What the libraries under the trainer refuse, as errors for people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from podtune.run.errors import ConfigError, Unavailable


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
