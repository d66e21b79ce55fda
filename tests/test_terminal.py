from __future__ import annotations

import errno
import io
import json
import os
import threading

import pytest

from r7convert import terminal
from r7convert.errors import FormatError, InputError, NetworkError, Offences, ResourceError, UnsupportedError, UsageError, VerifyError
from r7convert.progress import Progress
from r7convert.terminal import Bar, Lines, Terminal, format_table, report_error
from r7convert.units import in_bytes, in_time

NO_ROOM = f"next: {ResourceError.next_step}\n"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (345_900_000_000, "345.9 GB"), (12_345_678, "12.3 MB"), (2.5e15, "2500.0 TB")],
)
def test_sizes(count: float, text: str) -> None:
    assert in_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (725, "12 min 5 s"), (12000, "3 h 20 min")])
def test_durations(seconds: float, text: str) -> None:
    assert in_time(seconds) == text


def test_lines_come_at_most_every_30_s_and_say_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    lines = Lines(out)
    lines.start(10_000_000_000, "repack")
    for second in range(1, 96):
        clock[0] = 100.0 + second
        lines.advance(50_000_000, f"layer {second // 10}")
    lines.finish()
    assert out.getvalue().splitlines() == [
        "repack: 1.5 GB of 10.0 GB (15%), 50.0 MB/s, 2 min 50 s left, layer 3",
        "repack: 3.0 GB of 10.0 GB (30%), 50.0 MB/s, 2 min 20 s left, layer 6",
        "repack: 4.5 GB of 10.0 GB (45%), 50.0 MB/s, 1 min 50 s left, layer 9",
    ]


def test_a_short_job_and_an_empty_one_print_nothing_on_a_pipe() -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines.start(0, "verify")
    lines.advance(0, "layer 3")
    lines.finish()
    assert out.getvalue() == ""
    lines.say("left out: .cache")
    assert out.getvalue() == "left out: .cache\n"


def test_bar_draws_bytes_and_layer_and_counts_over_threads() -> None:
    out = Tty()
    bar = Bar(out)
    bar.advance(5)  # before a job begins: nothing to draw on
    bar.start(4000, "repack")
    threads = [threading.Thread(target=lambda: [bar.advance(1, "layer 7") for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bar._bar.n == 4000
    bar._bar.refresh()
    bar.say("a word")
    bar.finish()
    bar.finish()
    text = out.getvalue()
    assert "repack" in text
    assert "layer 7" in text
    assert "100% " in text
    assert "4.00kB of 4.00kB, " in text
    assert "B/s, 00:00 left, layer 7" in text
    assert "a word\n" in text


def test_the_switches_choose_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(Terminal(quiet=True, verbose=True).progress()) is Progress
    assert type(Terminal().progress()) is Lines
    monkeypatch.setattr(terminal.sys, "stderr", Tty())
    monkeypatch.setenv("TERM", "xterm")
    assert type(Terminal().progress()) is Bar
    monkeypatch.setenv("TERM", "dumb")
    assert type(Terminal().progress()) is Lines


def test_results_are_lines_or_json_and_talk_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().result({"a": 1}, ["one", "two"], "do this")
    Terminal().say("talk")
    Terminal(quiet=True).result({}, [], "silenced")
    assert capsys.readouterr() == ("one\ntwo\n", "next: do this\ntalk\n")
    Terminal(as_json=True).result({"a": ["ü"]}, ["one"], "do this")
    shown = capsys.readouterr()
    assert (json.loads(shown.out), shown.err) == ({"a": ["ü"]}, "")


def test_a_table_fits_its_width_and_loses_nothing() -> None:
    words = "gate and up of one expert differ in many of the layers, which this target cannot hold"
    lines = format_table(("target", "accepted", "why"), [("rank-sliced", "no", words), ("r7", "yes", "[not markup] :smile:")], width=50)
    assert max(map(len, lines)) <= 50
    assert len(lines) >= 4
    assert " ".join(" ".join(lines).split()) == f"target accepted why rank-sliced no {words} r7 yes [not markup] :smile:"
    long = format_table(("tensor",), [("x" * 200,)], width=80)
    assert sum(line.count("x") for line in long) == 200
    assert max(map(len, format_table(("a", "b"), [("y" * 70, "z" * 70)]))) <= 80


def test_numbers_of_a_table_are_flush_right() -> None:
    rows = [("a", "1,204", "9 B", "1"), ("b", "3", "12.5 MB", "K3")]
    assert format_table(("n", "tensors", "size", "last"), rows) == [
        "n  tensors     size  last",
        "a    1,204      9 B  1",
        "b        3  12.5 MB  K3",
    ]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("--tp: tp: expected 2, got 3"), 2, f"error: --tp: tp: expected 2, got 3\nnext: {UsageError.next_step}\n"),
        (FormatError("one\ntwo"), 3, f"error: one\nerror: two\nnext: {InputError.next_step}\n"),
        (FormatError("one. Do this.\ntwo"), 3, "error: one. Do this.\nerror: two\n"),
        (UnsupportedError("x"), 3, f"error: x\nnext: {UnsupportedError.next_step}\n"),
        (VerifyError("x"), 4, f"error: x\nnext: {VerifyError.next_step}\n"),
        (ResourceError("x"), 5, f"error: x\n{NO_ROOM}"),
        (NetworkError("x"), 6, f"error: x\nnext: {NetworkError.next_step}\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/out/f"), 5, f"error: /out/f: No space left on device\n{NO_ROOM}"),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 5, f"error: /out: Permission denied\n{NO_ROOM}"),
        *(
            (OSError(number, os.strerror(number), "/out/f"), 5, f"error: /out/f: {os.strerror(number)}\n{NO_ROOM}")
            for number in (errno.EIO, errno.EINVAL, errno.EFBIG, errno.EPERM, errno.EROFS)
        ),
        (MemoryError("4 GiB"), 5, "error: out of memory: 4 GiB. Use fewer --threads, or a smaller --layers range.\n"),
        (ValueError("odd"), 1, "error: unexpected ValueError: odd\nerror: Please report it, with the traceback that R7_DEBUG=1 prints.\n"),
        (KeyboardInterrupt(), 130, "interrupted: no file is left half-written, repeat the command to go on\n"),
    ],
)
def test_errors_have_their_code_and_no_traceback(error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(error) == code
    assert capsys.readouterr() == ("", text)


def test_many_offenders_are_cut_to_twenty_and_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    bad = Offences()
    for nth in range(33):
        bad.add(f"t{nth}", "dtype", expected="I16", found="I32")
    with pytest.raises(FormatError) as caught:
        bad.check()
    report_error(caught.value)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 22
    assert shown[0] == "error: t0: dtype: expected I16, got I32"
    assert shown[-2] == "error: ... and 13 more"
    assert shown[-1] == f"next: {FormatError.next_step}"


def test_debug_gives_the_traceback_and_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("R7_DEBUG", "1")
    report_error(FormatError("x"))
    assert "FormatError: x" in capsys.readouterr().err.splitlines()[0]
    monkeypatch.delenv("R7_DEBUG")
    for no_color, colored in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", "xterm")
        out = Tty()
        monkeypatch.setattr(terminal.sys, "stderr", out)
        report_error(FormatError("x"))
        assert ("\x1b[" in out.getvalue()) == colored
