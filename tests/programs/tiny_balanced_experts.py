"""tiny_experts.py with a loss of each sequence that balances the experts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from tiny_experts import with_experts

program = with_experts(balance=0.5)
