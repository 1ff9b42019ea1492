import io
import os
import pty
import re
import threading

import pytest

from tepo_nemo.runs.console import Console, format_step

METRICS = {
    "step": 12, "reward/mean": 0.412, "entropy/mean": 0.83, "ratio/clip_fraction": 0.006, "kl/mean": 1.2e-4,
    "mask/fraction": 0.31, "grad_norm": 0.42, "response_length/mean": 3.8, "time/step_s": 1.02,
    "time/rollout_s": 0.41, "time/old_stats_s": 0.1, "time/train_s": 0.46, "update/skipped": 0, "lr": 1e-4,
}  # fmt: skip
LINE = (
    "step 12/72  reward 0.412  entropy 0.830  clip 0.006  kl 1.2e-04  mask 0.31  gradnorm  0.42  len   3.8"
    "  1.02 s (rollout 0.41 old 0.10 train 0.46)"
)


def print_steps(stream, steps=(12,)):
    console = Console(72, stream)
    for step in steps:
        console.step_line({**METRICS, "step": step})
    console.message("saved [bold]checkpoint[/bold] :smile:")
    console.close()


def terminal_output(steps):
    """What a terminal of 80 columns is sent."""
    reader, writer = pty.openpty()
    chunks = []

    def read():
        try:
            while chunk := os.read(reader, 4096):
                chunks.append(chunk)
        except OSError:  # the way in which Linux tells that the other end is closed
            pass

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w") as stream:
        print_steps(stream, steps)
    thread.join()
    os.close(reader)
    return b"".join(chunks).decode()


def without_escapes(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_log_file_gets_one_plain_line_a_step(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    print_steps(stream)
    assert stream.getvalue() == LINE + "\nsaved [bold]checkpoint[/bold] :smile:\n"


def test_each_line_is_in_the_file_at_once(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        console = Console(72, stream)
        console.step_line(METRICS)
        assert (tmp_path / "log").read_text() == LINE + "\n"


def test_columns_line_up_over_the_run():
    first = format_step({**METRICS, "step": 9, "grad_norm": 12.5, "response_length/mean": 102.4}, 100)
    second = format_step({**METRICS, "step": 100}, 100)
    assert len(first) == len(second)
    assert first.startswith("step   9/100  ") and second.startswith("step 100/100  ")


def test_a_metric_that_a_step_lacks_is_left_out():
    assert format_step({"step": 1}, 8) == "step 1/8"
    assert format_step({"step": 1, "time/step_s": 2.0}, 8) == "step 1/8  2.00 s"
    assert format_step({"step": 1, "reward/mean": float("nan")}, 8) == "step 1/8  reward   nan"


@pytest.mark.parametrize(("share", "said"), [(0.1, ""), (0.834, "  truncated 83%"), (1, "  truncated 100%")])
def test_many_truncated_responses_are_told(share, said):  # faults 34
    assert format_step({"step": 1, "response_length/truncated_fraction": share}, 8) == "step 1/8" + said


def test_skipped_updates_and_evaluations_are_told():
    line = format_step({"step": 1, "update/skipped": 2, "eval/toy": 0.5, "eval/toy_greedy": 0.75}, 8)
    assert line == "step 1/8  skipped 2  eval/toy 0.500  eval/toy_greedy 0.750"


def test_a_terminal_gets_a_bar_and_whole_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = terminal_output([12, 13])
    assert re.search(r"\x1b\[[0-9;]*m", output), "a terminal gets colours"
    plain = without_escapes(output)
    assert re.search(r"training.*13/72", plain)
    for step in (12, 13):
        assert plain.count(LINE.replace("12/72", f"{step}/72")) == 1, "no line is broken or repeated"
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is back"


@pytest.mark.parametrize("terminal, expected", [("xterm", True), ("dumb", False)])
def test_no_color_and_a_dumb_terminal_are_respected(monkeypatch, terminal, expected):
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    output = terminal_output([12])
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", output), "no colours"
    assert LINE in without_escapes(output)
    assert ("training" in output) == expected
