"""A pretended accelerator: tensors that say they are on another device, while their numbers stay on the CPU.

What a GPU would refuse or wait for is noted, with the line of the package that asked for it: operations on tensors of
both devices, numbers read by the host, copies from the host.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_sparsegp

PACKAGE = str(Path(pyro_sparsegp.__file__).parent)
THERE = torch.device("meta")  # a device that every build of torch knows by name
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}


class There(torch.Tensor):
    """A tensor on the pretended device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here):
        new = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=THERE,
        )
        new.here = here
        return new

    def __repr__(self):
        return f"There({self.here})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Device.current.run(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Within it operations on the pretended device are carried out, and noted in ``events`` as (kind, place, what)."""

    current = None

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def note(self, kind, what):
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}" if frame else "outside"
        self.events.append((kind, place, what))

    def run(self, func, args, kwargs):
        name = func._schema.name.partition("::")[2]
        leaves = [*_leaves(args), *_leaves(kwargs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        there = [t for t in tensors if isinstance(t, There)]
        here = [t for t in tensors if not isinstance(t, There)]
        devices = [torch.device(leaf) for leaf in leaves if isinstance(leaf, torch.device)]
        asked = devices[0] if devices else None
        if not there and asked != THERE:
            return func(*args, **kwargs)
        bare = _map(_bare, (args, kwargs))
        lands = bool(there) if asked is None else asked == THERE
        if name in READS:
            self.note("read", name)
        if name in ("_to_copy", "copy_"):
            lands = isinstance(args[0], There) if name == "copy_" else lands
            crossing = here and lands if name == "_to_copy" else lands and not isinstance(args[1], There)
            if crossing:
                self.note("copy", f"{name} of {tuple(here[0].shape)}")
            elif there and not lands:
                self.note("read", name)
        elif name.startswith(("index", "_index_put")):
            # Indices and values may be numbers of the host, at the price of a copy.
            where = [part for part in args[1] if isinstance(part, torch.Tensor)] if isinstance(args[1], list) else []
            if any(part.dtype == torch.bool for part in where):
                self.note("read", f"{name} by a mask")
            if any(not isinstance(part, There) for part in where):
                self.note("copy", f"{name} by indices")
            if not isinstance(args[0], There):
                self.note("mix", name)
        elif there and any(t.dim() for t in here) and not name.startswith("lift"):
            self.note("mix", f"{name} with {[tuple(t.shape) for t in here if t.dim()]}")
        out = func(*bare[0], **bare[1])
        if not isinstance(out, (torch.Tensor, list, tuple)) or not lands:
            return out
        known = {id(t.here): t for t in there}

        def placed(part):
            return known.get(id(part), There(part)) if isinstance(part, torch.Tensor) else part

        if name in ("squeeze_", "unsqueeze_", "transpose_", "t_"):  # the wrapper's own shape moves as well
            from torch.utils._mode_utils import no_dispatch

            with no_dispatch():
                func(*args, **kwargs)
            return args[0]
        return _map(placed, out)

    def tensor(self, data, *args, **kwargs):
        """In the place of torch.tensor, which no dispatch sees."""
        device = kwargs.pop("device", None)
        made = _tensor(data, *args, **kwargs)
        if device is None or torch.device(device) != THERE:
            return made if device is None else made.to(device)
        self.note("copy", f"torch.tensor of {tuple(made.shape)}")
        return There(made)

    def item(self, tensor):
        """In the place of Tensor.item, which would look for the numbers on the device itself."""
        if not isinstance(tensor, There):
            return _item(tensor)
        self.note("read", "item")
        return tensor.here.item()


# PyTorch's own maps over such arguments take half of a run's time.


def _leaves(tree):
    """What a tree of tuples, lists and dicts has for leaves."""
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, (tuple, list, dict)):
            yield from _leaves(part)
        else:
            yield part


def _map(function, tree):
    """The tree with each leaf replaced."""
    if isinstance(tree, dict):
        return {name: _map(function, part) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)([_map(function, part) for part in tree])
    return function(tree)


def _bare(leaf):
    if isinstance(leaf, There):
        return leaf.here
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


_tensor, _item, _tolist, _new = torch.tensor, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.new_tensor


@contextmanager
def pretended_device():
    """The device, and with it what is noted."""
    device = Device()
    Device.current = device
    multithreaded = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    torch.tensor, torch.Tensor.item = device.tensor, lambda tensor: device.item(tensor)

    def tolist(tensor):
        if not isinstance(tensor, There):
            return _tolist(tensor)
        device.note("read", "tolist")
        return tensor.here.tolist()

    def new_tensor(tensor, data):
        there = isinstance(tensor, There)
        return device.tensor(data, dtype=tensor.dtype, device=THERE) if there else _new(tensor, data)

    torch.Tensor.tolist, torch.Tensor.new_tensor = tolist, new_tensor
    try:
        with device:
            yield device
    finally:
        torch.tensor, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.new_tensor = _tensor, _item, _tolist, _new
        torch.autograd.set_multithreading_enabled(multithreaded)
        Device.current = None
