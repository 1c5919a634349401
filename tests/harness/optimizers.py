"""Optimizers that a library may have, each with one habit, and optimizers of torch that look at whole matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

FACTORIES = {"Muon": "tests.harness.optimizers:muon_and_adamw", "Adafactor": "torch.optim:Adafactor"}
"""For ``optimizer.factory`` of a recipe."""


def rmsprop(named: list[tuple[str, nn.Parameter]], lr: float = 1e-3) -> list[torch.optim.Optimizer]:
    """RMSprop that does not amplify rounding: with its own eps of 1e-8 it divides rounding errors by their own size."""
    return [torch.optim.RMSprop([p for _, p in named], lr=lr, eps=1e-2)]


def muon_and_adamw(named: list[tuple[str, nn.Parameter]], lr: float = 1e-3) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for the others, as torch's documentation of Muon has it."""
    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    held = {id(p) for p in matrices}
    return [
        torch.optim.Muon(matrices, lr=lr),
        torch.optim.AdamW([p for _, p in named if id(p) not in held], lr=lr),
    ]


def own_rates(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """With learning rates of its own, in the ratio of ten to one."""
    matrices, vectors = [p for _, p in named if p.ndim == 2], [p for _, p in named if p.ndim != 2]
    return [torch.optim.SGD(matrices, lr=0.02), torch.optim.SGD(vectors, lr=0.002)]


class Plain(torch.optim.Optimizer):
    """Gradient descent; the others add to it."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, p.grad, group), alpha=-group["lr"])

    def begin(self, group: dict[str, Any]) -> None:
        """Called for every group at the start of a step."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad


class CountsInGroup(Plain):
    """AdaBelief, Adan and Lamb of pytorch_optimizer: ``group["step"]``, which is not there before the first step."""

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        mean.lerp_(grad, 0.1)
        return mean / (1 - 0.9 ** group["step"])


class CountsInAttributes(Plain):
    """StableSPAM, and EmoNavi: numbers of the optimizer, and state of no parameter."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.total += 1
        common: Any = self.state
        common["calls"] = common.get("calls", 0) + 1
        super().step(closure)

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        common: Any = self.state
        return grad / (self.total + 0.1 * common["calls"])


class CountsInState(Plain):
    """Older optimizers: a Python number in the state of a parameter, here with one that was None at first."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(step=0, former=None)
        state["step"] += 1
        sharpened = grad if state["former"] is None else 2 * grad - state["former"]
        state["former"] = grad.clone()
        return sharpened / state["step"] ** 0.5


class StartWeights(Plain):
    """Prodigy's p0: the state begins with the weights, and with numbers other than zero."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state["start"] = p.clone()
            state["shrunk"] = torch.ones(())
        state["shrunk"] *= 0.9
        return grad + (0.1 / (1 - state["shrunk"].item())) * (p - state["start"])


class ListsOfMatrices(Plain):
    """SOAP and Shampoo: lists of matrices of another shape, made in a first step that updates nothing."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        first = "factors" not in state
        if first:
            state["factors"] = [torch.eye(n, dtype=p.dtype) for n in p.shape if p.ndim == 2]
            state["order"] = "ij"[: p.ndim]
        if state["factors"]:
            left, right = state["factors"]
            left += grad @ grad.T
            right += grad.T @ grad
            grad = torch.linalg.solve(left, grad) @ torch.linalg.inv(right)
        return torch.zeros_like(grad) if first else grad


class LateState(Plain):
    """New state in the fifth step."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] < 5:
            return grad
        return grad + 0.1 * (p - state.setdefault("anchor", p.clone()))


class RowNorms(Plain):
    """Looks at whole rows and whole matrices, one parameter at a time: a trust ratio."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        rows = self.state[p].setdefault("rows", torch.zeros(p.shape[0], dtype=p.dtype))
        rows.lerp_(grad.reshape(p.shape[0], -1).norm(dim=1), 0.5)
        scaled = grad / (rows.view(-1, *[1] * (p.ndim - 1)) + 1e-3)
        return scaled * p.norm() / (scaled.norm() + 1e-3)


class SlowWeights(torch.optim.Optimizer):
    """Lookahead: holds another optimizer, and its own state from its construction on."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        self.inner = torch.optim.AdamW(params, lr=lr)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        for group in self.param_groups:
            group["counter"] = 0
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % 3
            for p in group["params"] if group["counter"] == 0 else ():
                self.state[p]["slow"].lerp_(p, 0.5)
                p.copy_(self.state[p]["slow"])


TRAIN_ANYWHERE: tuple[type[torch.optim.Optimizer], ...] = (
    *(CountsInGroup, CountsInAttributes, CountsInState, StartWeights, ListsOfMatrices, LateState, RowNorms),
    SlowWeights,
)
"""Under every layout they train what they train alone."""


class GlobalStepSize(Plain):
    """Prodigy and D-Adaptation: one number is computed from all parameters."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["d"] = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.param_groups[0]["d"] += sum(float(p.grad.square().sum()) for p in given)
        super().step(closure)

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad * self.param_groups[0]["d"]


class GlobalNorm(Plain):
    """Lamb with a clipping of its own: nothing is kept, but each update depends on all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in given]).norm()
        for grad in given:
            grad.div_(1 + norm)
        super().step(closure)


class ClipsItself(Plain):
    """Lamb with ``pre_norm``: it clips the norm of all gradients to 1."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step(closure)


class Remembered(Plain):
    """Steps parameters that it remembered when it was built."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.own = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.own:
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


NEED_ALL: tuple[type[torch.optim.Optimizer], ...] = (GlobalStepSize, GlobalNorm, Remembered)
"""They train where each rank has all parameters, and are refused elsewhere."""


class Draws(Plain):
    """Noise in every update."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + 0.01 * torch.randn_like(grad)


class Swaps(Plain):
    """ScheduleFree."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class OwnRate(Plain):
    """ASGD of pytorch_optimizer."""

    def begin(self, group: dict[str, Any]) -> None:
        group["lr"] *= 0.99


class Objects(Plain):
    """GaLore's projectors, Shampoo's preconditioners."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[p]["projector"] = object()
        return grad


class Growing(Plain):
    """A list that gets longer."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[p].setdefault("gradients", []).append(grad.clone())
        return sum(self.state[p]["gradients"])  # type: ignore[return-value]


class KeepsGenerator(Plain):
    """Counts in an object that neither a state nor a number is."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.factors = iter(range(1, 1000))

    def begin(self, group: dict[str, Any]) -> None:
        self.factor = next(self.factors)

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad / self.factor


class Amplifies(Plain):
    """SOAP's rotation where the gradient has no component: the sign of a rounding error decides."""

    def direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + (grad.mul(3).div(7).mul(7).div(3) - grad).sign()


class NeedsClosure(Plain):
    """LBFGS."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def name_of(factory: type[torch.optim.Optimizer]) -> str:
    """For ``optimizer.factory`` of a recipe."""
    return f"tests.harness.optimizers:{factory.__name__}"


class MatrixMuon(torch.optim.Optimizer):
    """Muon in the weights' dtype, of matrices and of stacks of matrices [.., o, i]: each matrix is orthogonalized."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                    buffer.lerp_(parameter.grad, 1 - group["momentum"])
                    update = orthogonal(parameter.grad.lerp(buffer, group["momentum"]))
                    taller = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                    parameter.sub_(update, alpha=group["lr"] * taller)


def orthogonal(matrices: Tensor) -> Tensor:
    """Five Newton-Schulz steps for every matrix [.., o, i], with the coefficients of Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_of_experts(named: list[tuple[str, nn.Parameter]], lr: float = 1e-3) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks and those of every expert, AdamW for the others."""
    matrices = [p for name, p in named if p.ndim >= 2 and "layers" in name]
    held = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in held]
    return [MatrixMuon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr)]
