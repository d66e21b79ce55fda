"""The command line in a process that loses its life at the second matrix, if it is rank 1: run by torchrun in test_team.py."""

from __future__ import annotations

import os
import signal
from typing import Any

from r7convert import cli, devices

_real, _calls = devices.encode_matrix, []


def encode_matrix(*args: Any, **options: Any) -> Any:
    _calls.append(1)
    if os.environ["RANK"] == "1" and len(_calls) == 4:  # the second layer of this rank, in its middle
        os.kill(os.getpid(), signal.SIGKILL)
    return _real(*args, **options)


if __name__ == "__main__":
    devices.encode_matrix = encode_matrix
    cli.run()
