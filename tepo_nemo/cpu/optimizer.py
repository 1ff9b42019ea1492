"""Adam with the state of Apex's FusedAdam, which Megatron-core and NeMo can shard into a checkpoint."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015) with decoupled weight decay (Loshchilov and Hutter, 2019).

    The step count stands once in each parameter group, not as a tensor beside each parameter as in
    `torch.optim.AdamW`; moments are fp32 whatever the parameter's dtype, and the update is computed in fp32.

    Args:
        adam_w_mode: decoupled weight decay if True, else the L2 term is added to the gradient.
        bias_correction: divide the moments by 1 - beta^step.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=tuple(betas), eps=eps, weight_decay=weight_decay
        )
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        weight, gradient = parameter.float(), parameter.grad.float()
        if decay and self.adam_w_mode:
            weight = weight * (1 - group["lr"] * decay)
        elif decay:
            gradient = gradient.add(weight, alpha=decay)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
        correction2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
        denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
        parameter.copy_(
            torch.addcdiv(weight, state["exp_avg"], denominator, value=-group["lr"] / correction1)
        )
