"""Optimizers that cannot be cut over ranks."""

import torch
import torch.distributed as dist


class Talking(torch.optim.SGD):
    """Communicates."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
        return super().step(closure)


class NormPerTensor(torch.optim.SGD):
    """As LARS: the step of a tensor is divided by the norm of its whole gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Keeps a number outside of its state."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise to what has 16 bits."""

    def step(self, closure=None):
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.dtype is torch.bfloat16:
                        parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return found


class NotOne:
    """No optimizer at all."""
