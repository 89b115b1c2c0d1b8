"""The same training as anybody would write it in plain torch, to compare with."""
