"""The progress display: a bar for people, few lines for logs."""

import io

from moe.demo_model.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_per_stage() -> None:
    stream = io.StringIO()
    bar = ProgressBar("Making", stream)
    for stage, fraction in (("reading", 0.0), ("reading", 0.05), ("writing", 0.5), ("writing", 1.0)):
        bar(stage, fraction)
    bar.close()
    assert stream.getvalue() == "Making:   0%, reading\nMaking:  50%, writing\n"


def test_a_terminal_gets_one_line_redrawn_in_place_and_ended_once() -> None:
    stream = Terminal()
    bar = ProgressBar("Making", stream)
    for fraction in (0.0, 0.5, 0.5, 1.0):
        bar("reading", fraction)
    bar.close()
    bar.close()
    drawn = stream.getvalue()
    assert drawn.count("\r") == 3  # an unchanged line is not drawn again
    assert drawn.count("\n") == 1
    assert f"[{'#' * 15}{'.' * 15}]  50% reading" in drawn
