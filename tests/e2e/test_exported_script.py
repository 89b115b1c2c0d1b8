"""The model of a script with the Trainer of transformers goes out of its run in one command."""

from __future__ import annotations

import json

import pytest
import torch
from support.e2e.shell import Shell
from support.worker.exported import transformers_model

transformers = pytest.importorskip(
    "transformers", reason="the models are of transformers (it is in the extra 'test')"
)
pytestmark = pytest.mark.e2e
STEPS = 3
SCRIPT = """
import torch, transformers, elastic
from tokenizers import Tokenizer, models
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, tie_word_embeddings=True)
words = {f"w{i}": i for i in range(32)}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), unk_token="w0", pad_token="w0")
ids = torch.arange(9)
rows = [{"input_ids": (ids + k) % 32, "labels": (ids + k) % 32} for k in range(24)]
trainer = transformers.Trainer(
    model=transformers.LlamaForCausalLM(config), train_dataset=rows, eval_dataset=rows[:5],
    processing_class=tokenizer,
    args=transformers.TrainingArguments("out", max_steps=STEPS, learning_rate=1e-2, use_cpu=True))
trainer = elastic.prepare_trainer(trainer, global_batch=4)
trainer.train()
print("evaluated:", trainer.evaluate()["eval_loss"])
trainer.save_model("OUT")
trainer._run.model.eval()
with torch.no_grad():
    torch.save(trainer._run.model(input_ids=ids[None])["logits"], "logits.pt")
"""


def test_from_pretrained_loads_the_exported_folder(shell: Shell) -> None:
    """With the logits that the script had at the end, and with its tokenizer."""
    folder = shell.root / "tiny"
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": 1}]
    shell.job(
        script="train.py", program=None, layout=None, pools=pools, steps=STEPS, global_batch=4
    )
    exported = shell.root / "exported"
    text = SCRIPT.replace("STEPS", str(STEPS)).replace("OUT", str(exported))
    (folder / "train.py").write_text(text.replace("logits.pt", str(shell.root / "logits.pt")))
    code, out, err = shell.here("run", "tiny", "--run-name", "run")
    assert code == 0, out + err
    (told,) = [line for line in out.splitlines() if "evaluated:" in line]
    report = json.loads((shell.root / "elastic_runs" / "run" / "report.json").read_text())
    assert float(told.split("evaluated:")[1]) == report["validation_loss"]
    assert "model: elastic checkpoint export run --to FOLDER" in out.splitlines()
    command = f"checkpoint export run --to {exported}"  # as save_model says
    assert f"`elastic {command}` writes the weights there" in out
    code, out, err = shell.here(*command.split())
    assert code == 0, err
    assert "config.json" in out and "tokenizer.json" in out

    model = transformers_model(exported).eval()
    with torch.no_grad():
        logits = model(torch.arange(9)[None]).logits
    torch.testing.assert_close(logits, torch.load(shell.root / "logits.pt"))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer("w3")["input_ids"] == [3]
