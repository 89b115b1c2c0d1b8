"""What a script does before its loop: the driver does it, then each worker; what the driver kept in
files is found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.docs.pages import blocks
from support.worker.forks import printed

pytest.importorskip("datasets", reason="what is mapped is of datasets (it is in the extra 'test')")
TOP = """
import os
from pathlib import Path
os.chdir(os.path.dirname(__file__))
os.environ["HF_HOME"] = str(Path("cache").absolute())
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
from datasets import load_dataset
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

def train_tokenizer(file):
    with open("done", "a") as done:
        done.write("trained\\n")
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    how = dict(vocab_size=60, special_tokens=["[UNK]", "[PAD]"], show_progress=False)
    made.train([file], trainers.BpeTrainer(**how))
    return made

def tokenize(rows):
    with open("done", "a") as done:
        done.write("mapped\\n")
    return {"input_ids": tokenizer(rows["text"])["input_ids"]}
"""
RUN = """
import sys
from elastic.worker.loop.script_host import ScriptSource
ScriptSource(sys.argv[1]).run()
"""


@pytest.mark.e2e
def test_what_the_page_keeps_is_made_once(tmp_path: Path) -> None:
    """By the first of the processes that run the script, as driver and workers do."""
    (kept,) = (
        block.text
        for block in blocks("huggingface.md", "python")
        if block.text.startswith("with FileLock")
    )
    script = tmp_path / "train.py"
    script.write_text(f"{TOP}\n{kept}\nprint(rows[0])\n")
    (tmp_path / "text.txt").write_text("a loop of one and a loop of two\n" * 20)
    driver = printed(RUN, str(script))
    with ThreadPoolExecutor() as pool:
        workers = list(pool.map(lambda _: printed(RUN, str(script)), range(2)))
    assert workers == [driver, driver] and "input_ids" in driver
    assert (tmp_path / "done").read_text() == "trained\nmapped\n"
