"""Optimizers that count beside the state of their parameters, each as libraries that people use do
it."""

import torch


class GroupStep(torch.optim.Optimizer):
    """Adam that counts in its groups (as apex, timm and pytorch_optimizer do), where the count is
    not before the first step; like apex it leaves out groups without parameters."""

    def __init__(self, params, lr=4e-3, betas=(0.9, 0.95), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            (a, b), n = group["betas"], group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                mean = state["exp_avg"].lerp_(p.grad, 1 - a) / (1 - a**n)
                square = state["exp_avg_sq"].lerp_(p.grad.square(), 1 - b) / (1 - b**n)
                self.update(p, mean / (square.sqrt() + group["eps"]), group)

    def update(self, p, direction, group):
        p.sub_(direction, alpha=group["lr"])


class GroupStepLamb(GroupStep):
    """The same for whole tensors: a step has the norm of the tensor (timm's LAMB)."""

    def update(self, p, direction, group):
        p.sub_(direction * (p.norm() / (direction.norm() + 1e-6)), alpha=group["lr"])


class OwnCount(torch.optim.SGD):
    """Counts on the object, which has the number from its first step on."""

    n_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.n_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.n_steps**0.5)


class StateCount(torch.optim.Optimizer):
    """MADGRAD (Defazio and Jelassi 2021): its count is in the state, under a text, and its first
    values are kept."""

    def __init__(self, params, lr=4e-3, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0], dtype=torch.long)
        k = self.state["k"].item()
        for group in self.param_groups:
            weight = group["lr"] * (k + 1) ** 0.5
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(x0=p.clone(), s=torch.zeros_like(p), sq=torch.zeros_like(p))
                state["sq"].addcmul_(p.grad, p.grad, value=weight)
                state["s"].add_(p.grad, alpha=weight)
                root = state["sq"].pow(1 / 3).add_(1e-6)
                p.lerp_(state["x0"] - state["s"] / root, 1 - group["momentum"])
        self.state["k"] += 1


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): its groups have a count, a sum of weights and the
    largest rate."""

    def __init__(self, params, lr=0.05, beta=0.9):
        numbers = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True}
        super().__init__(params, {"lr": lr, "beta": beta, **numbers})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k, beta = group["k"], group["beta"]
            lr = group["lr"] * min(1.0, (k + 1) / 4)
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] = k + 1


class Prodigy(torch.optim.SGD):
    """Its groups have a number that all gradients together make."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        for group in self.param_groups:
            group["d"] = group.get("d", 0.0) + float(sum(grad.abs().sum() for grad in grads))
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, which has its own state (Zhang et al. 2019)."""

    def __init__(self, base, every=5):
        super().__init__([p for g in base.param_groups for p in g["params"]], {"lr": 1.0})
        self.base, self.every, self.n, self.slow = base, every, 0, {}

    @torch.no_grad()
    def step(self, closure=None):
        for group, own in zip(self.base.param_groups, self.param_groups):
            group["params"] = own["params"]
        self.base.step()
        self.n += 1
        if self.n % self.every == 0:
            for p in self.param_groups[0]["params"]:
                slow = self.slow.setdefault(p, p.clone())
                p.copy_(slow.lerp_(p, 0.5))


class Late(torch.optim.SGD):
    """Keeps something from its fifth step on."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            for p in group["params"]:
                if group["n"] >= 5:
                    self.state[p].setdefault("slow", torch.zeros_like(p)).lerp_(p, 0.5)


class SharedLookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups and state it has; its own begins as the weights
    do, and acts for the first time in the fifth step."""

    def __init__(self, base, every=5):
        super().__init__(base.param_groups, {})
        self.base, self.every, self.n = base, every, 0
        self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.n += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.n % self.every == 0:
                    p.copy_(slow.lerp_(p, 0.5))
