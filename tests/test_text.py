"""Amounts in words: each as many digits as tell something."""

from __future__ import annotations

import pytest

from elastic import text as text_of


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("step 3: ▶ 0,5 ü\t1\n", "step 3: ▶ 0,5 ü\t1\n"),
        ("\x1b]0;x\x07", "\\x1b]0;x\\x07"),
        ("a\rb\x9b2J\u202ec\udc80", "a\\rb\\x9b2J\\u202ec\\udc80"),
        ("\x00\x7f\x85\u200f\u061c\u2067", "\\x00\\x7f\\x85\\u200f\\u061c\\u2067"),
        ("10\u00a0000\u202f\u3000€ \u2028\u00ad", "10\u00a0000\u202f\u3000€ \u2028\u00ad"),
        ("👩\u200d🔬 ❤\ufe0f می\u200cخواهم", "👩\u200d🔬 ❤\ufe0f می\u200cخواهم"),
        ("a\r\nb\r\r\n\tc\r", "a\nb\n\tc"),
    ],
)
def test_what_would_command_a_terminal_is_escaped(said: str, shown: str) -> None:
    assert text_of.printable(said) == shown
    assert text_of.one_line("so\x1b[2J\r\n  so ", 99) == "so\\x1b[2J so"
    assert text_of.one_line("so " * 99, 5) == "so so... (296 characters)"


GREEN, RESET = "\x1b[32m", "\x1b[0m"


@pytest.mark.parametrize(
    ("said", "colored", "plain"),
    [
        ("step 3", "step 3", "step 3"),
        (f"{GREEN}ok{RESET}", f"{GREEN}ok{RESET}", "ok"),
        (f"{GREEN}o\r\nk\x1b[1;38;5;9m!", f"{GREEN}o{RESET}\nk\x1b[1;38;5;9m!{RESET}", "o\nk!"),
        ("\x1b[A\x1b[2K 5%|█ |\x1b[K\x1b[?25l\x1b[10;2H", " 5%|█ |", " 5%|█ |"),
        (f"\x1b]0;x\x07{GREEN}\x9b", f"\\x1b]0;x\\x07{GREEN}\\x9b{RESET}", "\\x1b]0;x\\x07\\x9b"),
        ("\x1b[6n\x1b[>0;1m\x1b[", "\\x1b[6n\\x1b[>0;1m\\x1b[", "\\x1b[6n\\x1b[>0;1m\\x1b["),
        # what is left out joins nothing to a command
        ("\x1b\x1b[A]0;x\x07", "\\x1b]0;x\\x07", "\\x1b]0;x\\x07"),
        ("\x1b\x1b[0m[6n", f"\\x1b{RESET}[6n{RESET}", "\\x1b[6n"),
    ],
)
def test_of_programs_colors_pass_and_cursors_stay_where_they_are(
    said: str, colored: str, plain: str
) -> None:
    assert text_of.program_output(said, colored=True) == colored
    assert text_of.program_output(said, colored=False) == plain


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0.0, "-"),
        (0.01, "36 s"),
        (0.5, "30 min"),
        (36, "36.0 h"),
        (504, "21.0 days"),
        (26280, "3.0 years"),
    ],
)
def test_hours(hours: float, text: str) -> None:
    assert text_of.hours(hours) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "12 ms"), (0.5, "0.50 s"), (12.34, "12.3 s"), (6692.3, "1.9 h")]
)
def test_seconds(value: float, text: str) -> None:
    assert text_of.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "$0"), (0.0068, "$0.0068"), (2.5, "$2.50"), (12345, "$12,345"), (2.5e6, "$2.5 M")],
)
def test_dollars(value: float, text: str) -> None:
    assert text_of.usd(value) == text
