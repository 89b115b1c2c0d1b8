"""The small program with fewer blocks: what the paced one is compared with."""

from dataclasses import replace

from elastic.certify.programs.small import CONFIG
from elastic.certify.programs.small import program as small
from elastic.models.llama import Llama

SHORT = replace(CONFIG, n_layers=4)

program = replace(small, model=lambda: Llama(SHORT))
