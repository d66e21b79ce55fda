"""`python -m r7convert` and the console script."""

from __future__ import annotations


def main() -> None:
    from r7convert.cli import run

    run()


if __name__ == "__main__":
    main()
