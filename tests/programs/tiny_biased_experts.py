"""tiny_experts.py with a bias of each expert that balances them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from tiny_experts import with_experts

program = with_experts(bias_rate=0.02)
