"""What optimizers keep for whole tensors, nested, found by a trial; and what any of them count."""
