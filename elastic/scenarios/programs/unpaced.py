"""The small program with fewer blocks: what the paced one is compared with."""

from dataclasses import replace

from elastic.models.llama import Llama
from elastic.scenarios.programs.small import CONFIG
from elastic.scenarios.programs.small import program as small

SHORT = replace(CONFIG, n_layers=4)

program = replace(small, model=lambda: Llama(SHORT))
