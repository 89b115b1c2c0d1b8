"""`elastic plan --score`: a CSV file of measurements, compared, or refused in one line with its row
and column."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic.cli.command_line import main

HEAD = (
    "id,model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,gpu,gpus,dp_shard,tp,pp,micro_batch,global_batch,"
    "precision,tokens_per_s_per_gpu"
)
ROW = "a,llama3-8b,8.03,32,4096,32,8,14336,128256,8192,H100,8,8,1,1,1,16,bf16,5762"


def scored(tmp_path: Path, capsys: pytest.CaptureFixture[str], *lines: str) -> tuple[int, str, str]:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(lines) + "\n")
    code = main(("plan", "--score", str(file), "--json"))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_row_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = scored(
        tmp_path, capsys, HEAD, ROW, ROW.replace("a,", "b,", 1).replace("5762", "11524")
    )
    data = json.loads(out)
    assert (code, data["rows"], data["rows_timed"]) == (0, 2, 2)
    assert data["median_abs_err"] < 0.6  # the second row says twice the speed of the same
    assert main(("plan", "--score", str(tmp_path / "rows.csv"))) == 0
    shown = capsys.readouterr().out
    assert "tokens/s: 2 rows, median error" in shown
    assert "5762" in shown


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (
            (HEAD.replace(",gpu,", ",chip,"), ROW),
            "column 'gpu' is missing; it needs model, params_b",
        ),
        (
            (HEAD, ROW.replace(",8,8,1,1", ",8,eight,1,1")),
            "row a: dp_shard must be a number, not 'eight'",
        ),
        ((HEAD, ROW.replace("H100", "H1000")), "row a: gpu: unknown GPU 'H1000'"),
        ((HEAD, ROW + ",more"), "row a: it has not as many cells as the header"),
        ((HEAD, ROW.replace("a,", ",", 1) + ",more"), "row in line 2: it has not"),
        ((HEAD, ROW.removesuffix("5762")), "no row has all of"),
        ((HEAD,), "no row has all of"),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: tuple[str, ...], what: str
) -> None:
    code, out, err = scored(tmp_path, capsys, *lines)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "rows.csv: " in err
    assert what in err


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("plan", "--score", "nowhere.csv")) == 2
    assert "nowhere.csv: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_public_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(os.environ.get("ELASTIC_SHARED", "../shared")) / "planner" / "public.csv"
    if not file.is_file():
        pytest.skip(f"{file} is not there (ELASTIC_SHARED)")
    assert main(("plan", "--score", str(file), "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows_timed"] > 100
    assert data["median_abs_err"] < data["constant_mfu_median_abs_err"]
