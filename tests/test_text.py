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
    ],
)
def test_what_would_command_a_terminal_is_escaped(said: str, shown: str) -> None:
    assert text_of.printable(said) == shown
    assert text_of.one_line("so\x1b[2J\r\n  so ", 99) == "so\\x1b[2J so"
    assert text_of.one_line("so " * 99, 5) == "so so... (296 characters)"


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
