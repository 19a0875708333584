"""Functions as kernels, and kernels of other libraries: Pyro's own and GPyTorch's, as covariance functions of tensors.

The modules keep their parameters. So that these train, the model must register the module, as any
network: ``pyro.module("kernel", module)``, or an attribute of a ``PyroModule`` model.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .algebra import Foreign, Kernel
from .base import second


def from_function(function: Callable[[Tensor, Tensor], Tensor], diag: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel from two functions of tensors. It can be added, multiplied and put on columns like any other.

    >>> brownian = from_function(lambda x, z: torch.minimum(x, z.mT), lambda x: x[..., 0])
    >>> (2.0 * brownian[-1])(torch.ones(3, 2)).shape
    torch.Size([3, 3])

    :param function: k(x, z), ``(N, D)`` and ``(M, D)`` to ``(N, M)``.
    :param diag: its diagonal k(xₙ, xₙ), ``(N, D)`` to ``(N,)``.
    :raises ValueError: if one of them is not callable.
    """
    given = {"function": function, "diag": diag}
    if wrong := [name for name, value in given.items() if not callable(value) or isinstance(value, type)]:
        raise ValueError(f"from_function's {wrong[0]} must be a function of tensors, got {given[wrong[0]]!r}")
    return Foreign(lambda x, z: function(x, second(x, z)), diag, function)


@functools.cache
def _frozen_class(cls: type) -> type:
    return types.new_class(f"Frozen{cls.__name__}", (cls,), exec_body=lambda ns: ns.update(__call__=cls.forward))  # type: ignore[attr-defined]


def _freeze(module: Any) -> Any:
    # Reading an attribute of a PyroModule is a param or sample statement; outside its own call a PyroSample is
    # drawn anew at every reading. Read each once, now, into a copy whose forward then sees plain tensors.
    cls: Any = type(module)
    frozen: Any = object.__new__(_frozen_class(cls))
    contents = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    names = {*module._pyro_params, *module._pyro_samples, *module._parameters, *module._buffers}
    names -= {f"{name}_unconstrained" for name in module._pyro_params}
    names -= {f"{name}_{part}" for name, (_, parts) in module._guides.items() for part in parts}  # of its own guide
    contents.update((name, getattr(module, name)) for name in names)
    children = module._modules.items()
    contents.update((name, _freeze(child) if _is_pyro_kernel(child) else child) for name, child in children)
    vars(frozen).update(contents)
    return frozen


def _is_pyro_kernel(module: nn.Module) -> bool:
    from pyro.contrib.gp.kernels import Kernel as PyroKernel

    return isinstance(module, PyroKernel)


def from_pyro(kernel: Any) -> Kernel:
    """A ``pyro.contrib.gp.kernels`` module as a kernel. Call it inside the model, where its priors are sampled.

    :param kernel: the module, with inputs ``(N, D)`` and no batch dimensions.
    :raises ValueError: if ``kernel`` is not such a module.
    """
    if not _is_pyro_kernel(kernel):
        raise ValueError(f"from_pyro needs a pyro.contrib.gp.kernels.Kernel, got {type(kernel).__name__}")
    frozen = _freeze(kernel)
    return Foreign(frozen, lambda x: frozen(x, diag=True), kernel)


def from_gpytorch(kernel: object) -> Kernel:
    """A ``gpytorch.kernels`` module as a kernel (needs GPyTorch).

    :param kernel: the module; its batch dimensions lead.
    :raises ImportError: if GPyTorch is not installed.
    :raises ValueError: if ``kernel`` is not such a module, or has several values at each input (``MultitaskKernel``,
        kernels of gradients).
    """
    try:
        from gpytorch.kernels import Kernel as GPyTorchKernel
    except ImportError as error:
        raise ImportError("kernels.from_gpytorch needs GPyTorch: pip install gpytorch") from error
    if not isinstance(kernel, GPyTorchKernel):
        raise ValueError(f"from_gpytorch needs a gpytorch.kernels.Kernel, got {type(kernel).__name__}")
    place = torch.zeros(1, 1)
    parts = [part for part in kernel.modules() if isinstance(part, GPyTorchKernel)]
    # a sum or a scaled kernel does not tell of its parts
    if several := [part for part in reversed(parts) if part.num_outputs_per_input(place, place) > 1]:
        raise ValueError(
            f"from_gpytorch takes kernels of one value at each input; {type(several[0]).__name__} has several. Write "
            "GaussianProcess(kernel, x).expand([P]).to_event(1), mixed by A @ f where outputs are correlated."
        )
    return Foreign(lambda x, z: kernel(x, z).to_dense(), lambda x: kernel(x, diag=True), kernel)
