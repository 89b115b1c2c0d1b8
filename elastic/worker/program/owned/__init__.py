"""What optimizers keep that step whole tensors: of any shape, nested, found by a trial."""
