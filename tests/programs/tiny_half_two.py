"""As tiny_half.py, with the two optimizers of tiny_two.py."""

from dataclasses import replace
from pathlib import Path

from elastic.program import load_program

HERE = Path(__file__)
program = replace(
    load_program(HERE.with_name("tiny_half.py")),
    optimizer=load_program(HERE.with_name("tiny_two.py")).optimizer,
)
