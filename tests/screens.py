"""Command lines as a person gives them, one after the other in one process, so that a test can look over the person's shoulder.

    python -m tests.screens 'r7convert sample r7' 'NO_COLOR=1 r7convert verify r7' ...

A word NAME=VALUE before the command is set for it alone. After each command a line says what it ended with.
"""

from __future__ import annotations

import os
import shlex
import sys
from unittest.mock import patch

from r7convert import cli


def run_line(line: str) -> int:
    """One command line through the door that the console script takes; its exit code."""
    words = shlex.split(line)
    start = words.index("r7convert")
    variables = dict(word.split("=", 1) for word in words[:start])
    with patch.dict(os.environ, variables), patch.object(sys, "argv", words[start:]):
        try:
            cli.run()
        except SystemExit as leaving:
            return int(leaving.code or 0)


if __name__ == "__main__":
    for line in sys.argv[1:]:
        print(f"$ {line}", flush=True)
        code = run_line(line)
        sys.stdout.flush()
        print(f"= {code}", flush=True)
