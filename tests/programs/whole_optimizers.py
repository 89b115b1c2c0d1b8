"""Optimizers of a user's own that look at whole tensors: LAMB, LARS, one like Shampoo, SOAP."""

import torch


class EachTensor(torch.optim.Optimizer):
    """Steps each tensor by itself (`_step`)."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)


class Lamb(EachTensor):
    """Adam whose step of a tensor has the norm of the tensor (You et al. 2020)."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _step(self, p, group):
        state, (a, b) = self.state[p], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].lerp_(p.grad, 1 - a)
        state["exp_avg_sq"].lerp_(p.grad.square(), 1 - b)
        mean = state["exp_avg"] / (1 - a ** state["step"])
        root = (state["exp_avg_sq"] / (1 - b ** state["step"])).sqrt()
        update = mean / (root + group["eps"]) + group["weight_decay"] * p
        norms = p.norm(), update.norm()
        ratio = norms[0] / norms[1] if float(norms[0]) > 0 and float(norms[1]) > 0 else 1.0
        p.sub_(update * ratio, alpha=group["lr"])


class Shampoo(EachTensor):
    """Preconditioned by roots of Kronecker factors (Gupta et al. 2018), in short: factors and roots
    are lists, dimensions above `most` have none, and the first step only begins them."""

    def __init__(self, params, lr=3e-2, beta=0.9, eps=1e-2, every=3, most=48):
        defaults = {"lr": lr, "beta": beta, "eps": eps, "every": every, "most": most}
        super().__init__(params, defaults)

    def _step(self, p, group):
        state, grad = self.state[p], p.grad
        if not state:
            sizes = p.shape if p.ndim == 2 else ()
            state["step"], state["roots"] = 0, None
            state["factors"] = [grad.new_zeros(n, n) if n <= group["most"] else [] for n in sizes]
        for dim, factor in enumerate(state["factors"]):
            if len(factor):
                factor.lerp_(grad @ grad.T if dim == 0 else grad.T @ grad, 1 - group["beta"])
        if state["step"] % group["every"] == 0:
            state["roots"] = [self._root(f, group["eps"]) for f in state["factors"]]
        state["step"] += 1
        if state["step"] == 1:
            return
        for dim, root in enumerate(state["roots"]):
            if len(root):
                grad = root @ grad if dim == 0 else grad @ root
        p.sub_(grad / (grad.norm() + 1e-6), alpha=group["lr"])

    def _root(self, factor, eps):
        if not len(factor):
            return []
        values, vectors = torch.linalg.eigh(factor + eps * torch.eye(len(factor)).to(factor))
        return vectors @ (values.clamp_min(eps) ** -0.25).diag() @ vectors.T


class Lars(EachTensor):
    """Momentum of gradients that have the norm of their matrix, times `trust` (You et al. 2017)."""

    def __init__(self, params, lr=1.0, momentum=0.9, weight_decay=1e-4, trust=1e-2):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    def _step(self, p, group):
        state, update = self.state[p], p.grad + group["weight_decay"] * p
        if p.ndim > 1:
            norms = p.grad.norm() + group["weight_decay"] * p.norm()
            update = update * (group["trust"] * p.norm() / norms.clamp_min(1e-12))
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].mul_(group["momentum"]).add_(update)
        p.sub_(state["momentum"], alpha=group["lr"])


class Soap(EachTensor):
    """Adam in the eigenbases of Shampoo's factors, which follow them by one QR iteration every
    `every` steps (Vyas et al. 2024). The factors begin with eigenvalues up to `apart`, all of them
    distinct; 0 is SOAP as it was published, whose first factors have as many eigenvalues of 0 as
    the gradient has ranks too few: which of their bases is found, rounding decides."""

    def __init__(self, params, lr=3e-3, beta=0.95, eps=1e-8, every=2, apart=1e-3):
        defaults = {"lr": lr, "beta": beta, "eps": eps, "every": every, "apart": apart}
        super().__init__(params, defaults)

    def _step(self, p, group):
        state, grad, rest = self.state[p], p.grad, 1 - group["beta"]
        if not state:
            sizes = p.shape if p.ndim == 2 else ()
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            apart = [torch.linspace(0, group["apart"], n).to(p).diag() for n in sizes]
            state["factors"] = [f.lerp(g, rest) for f, g in zip(apart, self._outer(grad))]
            state["bases"] = [torch.linalg.eigh(f)[1].flip(1) for f in state["factors"]]
            return
        state["step"] += 1
        bases, moment = state["bases"], state["exp_avg"].lerp_(grad, rest)
        state["exp_avg_sq"].lerp_(self._turned(grad, bases).square(), rest)
        update = self._turned(moment, bases) / (state["exp_avg_sq"].sqrt() + group["eps"])
        seen = 1 - group["beta"] ** state["step"]  # both moments begin as 0
        back = self._turned(update, [basis.T for basis in bases])
        p.sub_(back, alpha=group["lr"] * seen**0.5 / seen)
        for factor, one in zip(state["factors"], self._outer(grad)):
            factor.lerp_(one, rest)
        if state["step"] % group["every"] == 0:
            for dim, (factor, basis) in enumerate(zip(state["factors"], bases)):
                product = factor @ basis
                order = (basis * product).sum(0).argsort(descending=True)
                state["exp_avg_sq"] = state["exp_avg_sq"].index_select(dim, order)
                bases[dim] = torch.linalg.qr(product[:, order])[0]

    def _outer(self, grad):
        return (grad @ grad.T, grad.T @ grad) if grad.ndim == 2 else ()

    def _turned(self, grad, bases):
        return bases[0].T @ grad @ bases[1] if bases else grad


class Together(torch.optim.SGD):
    """Clips all gradients together."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)


class Growing(torch.optim.SGD):
    """Keeps a list of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("seen", []).append(p.grad.norm())
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Elsewhere(torch.optim.SGD):
    """Keeps a number that belongs to no parameter, in its state under a text."""

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["n"] = self.state["all"].get("n", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Numpy(torch.optim.SGD):
    """Leaves torch for a moment, which tensors without values cannot."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.reshape(len(p) if p.ndim else 1, -1).numpy().astype("float64")
                self.state[p]["norms"] = torch.from_numpy((rows**2).sum(1))
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Stateful(torch.optim.SGD):
    """Counts its steps on the object."""

    n_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.n_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"] / self.n_steps)
