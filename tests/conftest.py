"""Fixtures of more than one test file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.hub_server import HubServer
from tests.outputs import Made, maker

# A deadline would measure how busy the machine is.
settings.register_profile("r7convert", deadline=None)
settings.load_profile("r7convert")


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Good outputs by name, see tests/outputs.py. Harm copies only."""
    return maker(tmp_path_factory)


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that write hundreds of files, none of which has to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that judge hundreds of folders by contract and bytes: slabs are not computed."""
    monkeypatch.setattr("r7convert.verify.check_numbers", lambda *_, **__: None)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A loopback Hub, and this process's huggingface_hub turned to it. `hub.sleeps` has every wait the client asked for;
    waits are cut short so that the tests are not.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with HubServer(tmp_path / "hub") as server:
        for name, value in server.env(tmp_path / "hf_home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        really_sleep = time.sleep

        def hurry(seconds: float) -> None:
            if seconds >= 0.5:
                server.sleeps.append(seconds)
            really_sleep(min(seconds, 0.01))

        monkeypatch.setattr(time, "sleep", hurry)
        yield server
        close_session()
    assert not server.errors, server.errors
