"""Which bytes go from which rank to which when the layout changes: integers only;
worker/state/state_transfer.py moves them. Boxes of tensors are cut into pieces, pieces get routes
from senders, routes become transfers in chunks."""
