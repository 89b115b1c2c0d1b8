"""Which bytes go from which rank to which when the layout changes: integers only;
worker/state/transfer.py moves them."""
