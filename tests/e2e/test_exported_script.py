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
import os
os.environ["HF_HUB_OFFLINE"] = "1"
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
    args=transformers.TrainingArguments(
        "out", max_steps=STEPS, learning_rate=1e-2, use_cpu=True, load_best_model_at_end=True,
        eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1))
trainer = elastic.prepare_trainer(trainer, global_batch=4)
trainer.train()
print("evaluated:", trainer.evaluate()["eval_loss"])
print("another:", trainer.evaluate(rows[:5], metric_key_prefix="test")["test_loss"])
trainer.save_model("OUT")
if trainer._run.rank == 0:
    print("predicted:", trainer.predict(rows[:5]).predictions.shape)
    loaded = transformers.LlamaForCausalLM.from_pretrained("OUT").eval()
    with torch.no_grad():
        torch.save(loaded(ids[None]).logits, "logits.pt")
trainer.push_to_hub()
"""


@pytest.mark.whole
def test_a_trainer_saves_what_the_export_gives(shell: Shell) -> None:
    """Of a model in two parts: the script itself loads it behind save_model, evaluates, predicts. A
    hub that is away costs one line; the tokenizer is there too."""
    folder = shell.root / "tiny"
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": 2}]
    shell.job(
        script="train.py", program=None, layout="dp_shard=2", pools=pools, steps=STEPS,
        global_batch=4,
    )  # fmt: skip
    saved, exported = shell.root / "saved", shell.root / "exported"
    text = SCRIPT.replace("STEPS", str(STEPS)).replace("OUT", str(saved))
    (folder / "train.py").write_text(text.replace("logits.pt", str(shell.root / "logits.pt")))
    code, out, err = shell.here("run", "tiny", "--run-name", "run")
    assert code == 0, out + err
    told = {
        word: line.split(word)[1]
        for word in ("evaluated:", "another:")
        for line in out.splitlines()
        if word in line
    }
    report = json.loads((shell.root / "elastic_runs" / "run" / "report.json").read_text())
    assert float(told["evaluated:"]) == report["validation_loss"]
    assert float(told["another:"]) == pytest.approx(report["validation_loss"], abs=1e-5)
    assert "predicted: (5, 9, 32)" in out and f"the trained model is in {saved} on " in out
    best = "[rank 0] note: load_best_model_at_end: the Trainer's model is that of the last step"
    assert best in out and "`elastic checkpoint export run --step best --to FOLDER`" in out
    (refused,) = [line for line in (out + err).splitlines() if "trainer.push_to_hub(): " in line]
    assert "`elastic checkpoint export run --to FOLDER` and `hf upload REPO FOLDER`" in refused

    assert "model: elastic checkpoint export run --to FOLDER" in out.splitlines()
    code, out, err = shell.here("checkpoint", "export", "run", "--to", str(exported))
    assert code == 0, err
    assert "config.json" in out and "tokenizer.json" in out
    model = transformers_model(exported).eval()
    with torch.no_grad():
        logits = model(torch.arange(9)[None]).logits
    torch.testing.assert_close(logits, torch.load(shell.root / "logits.pt"))
    torch.testing.assert_close(model.state_dict(), transformers_model(saved).state_dict())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for place in (saved, exported):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        assert tokenizer("w3")["input_ids"] == [3]
