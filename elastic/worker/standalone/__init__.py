"""The same session under torchrun: a static plan, no Ray, no driver."""
