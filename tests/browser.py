"""A headless Chromium, where this machine has one: in the PATH under any of its names, named by CHROME, or fetched by playwright."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chrome-headless-shell",
    "microsoft-edge",
    "brave-browser",
)
PLAYWRIGHT = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache/ms-playwright"))


def find_browser() -> str:
    """Its path; without one the test is skipped, with what was looked for."""
    fetched = sorted(PLAYWRIGHT.glob("chromium*/chrome-*/*chrome*")) + sorted(PLAYWRIGHT.glob("chromium*/chrome-*/headless_shell"))
    found = [
        os.environ.get("CHROME"),
        *map(shutil.which, NAMES),
        *(str(path) for path in fetched if os.access(path, os.X_OK) and path.is_file()),
    ]
    browser = next(filter(None, found), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} in the PATH, CHROME not set, nothing in {PLAYWRIGHT}")
    return browser


def shoot(page: Path, shot: Path, *, width: int, height: int, dark: bool = False) -> None:
    """A picture of the page as a window of that size shows it."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={shot.parent / 'profile'}"]
    flags += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},{height}", f"--screenshot={shot}"]
    subprocess.run([find_browser(), *flags, page.as_uri()], check=True, capture_output=True, timeout=60)
