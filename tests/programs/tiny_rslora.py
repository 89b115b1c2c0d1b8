"""As tiny.py, with adapters of rsLoRA, as a configuration of peft says them."""

from pathlib import Path

from elastic.models.lora import lora_of_peft
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny.py"))
program = lora_of_peft(
    BASE, {"r": 4, "lora_alpha": 8, "target_modules": ["wq", "wo", "w2"], "use_rslora": True}
)
