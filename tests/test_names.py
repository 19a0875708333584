"""What the Python of a program names: changes of it are seen, those of what it does not name are none."""

import functools
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from pyro_sparsegp.program.names import Named

flag = 0
config = ModuleType("config")
config.scale, config.other = 1.0, 1.0


def helper(x, scale=1.0):
    return x * scale + flag


class Counts:
    total = 0

    def __init__(self, more=None):
        self.count, self.seen, self.more = 0, [], more

    @property
    def half(self):
        return self.count / 2

    def forward(self, x):
        return self.step(x)

    def step(self, x):
        return x + self.count + self.total

    __call__ = forward


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        self.depth, self.losses = 1, []

    def forward(self, x):
        for _ in range(self.depth):
            x = self.net(x)
        return x


def set_flag():
    global flag
    flag += 1


BOX, ARRAY, TABLE, OBJECT = [0, 0], np.zeros(3), {"a": [1]}, Counts()
NETWORK, NESTED = Network(), SimpleNamespace(inner=SimpleNamespace(value=1))
PARTIAL = functools.partial(helper, scale=OBJECT)


@pytest.mark.parametrize(
    ("program", "change", "place"),
    [
        (lambda x: helper(x), set_flag, "model helper flag"),
        (lambda x: [k for k in x if k > flag], set_flag, "model flag"),
        (lambda x: x + BOX[1], lambda: BOX.__setitem__(1, BOX[1] + 1), "model BOX[1]"),
        (lambda x: x + BOX[-1], lambda: BOX.append(1), "model BOX.__len__()"),
        (lambda x: x + TABLE["a"][0], lambda: TABLE["a"].__setitem__(0, TABLE["a"][0] + 1), "model TABLE['a'][0]"),
        (lambda x: x + ARRAY.sum(), lambda: ARRAY.__iadd__(1), "model ARRAY[:]"),
        (lambda x: x * config.scale, lambda: setattr(config, "scale", config.scale + 1), "model config.scale"),
        (
            lambda x: x * NESTED.inner.value,
            lambda: setattr(NESTED.inner, "value", object()),
            "model NESTED.inner.value",
        ),
        (lambda x: OBJECT(x), lambda: setattr(OBJECT, "count", OBJECT.count + 1), "model OBJECT.count"),
        (lambda x: OBJECT.step(x), lambda: setattr(Counts, "total", Counts.total + 1), "model OBJECT.total"),
        (lambda x: x + OBJECT.half, lambda: setattr(OBJECT, "count", OBJECT.count + 1), "model OBJECT.count"),
        (OBJECT.step, lambda: setattr(OBJECT, "count", OBJECT.count + 1), "model.__self__.count"),
        (PARTIAL, lambda: setattr(helper, "__defaults__", (helper.__defaults__[0] + 1,)), "model.func.__defaults__[0]"),
        (NETWORK, lambda: setattr(NETWORK, "depth", NETWORK.depth + 1), "model.depth"),
        (NETWORK, lambda: NETWORK.net.append(torch.nn.ReLU()), "model.net.__len__()"),
        (NETWORK, lambda: NETWORK.net.__setitem__(1, torch.nn.Tanh()), "model.net['1']"),
    ],
)
def test_a_change_is_seen(program, change, place):
    before = Named(program)
    assert before.hold()
    change()
    assert not before.hold()
    after = Named(program)
    assert place in after.changed(before)
    assert after.key != before.key
    assert after.hold()


@pytest.mark.parametrize(
    ("program", "change"),
    [
        (NETWORK, lambda: NETWORK.losses.append(1.0)),
        (NETWORK, lambda: NETWORK.net[0].weight.data.add_(1)),
        (OBJECT.step, lambda: OBJECT.seen.append(1.0)),
        (lambda x: x * config.scale, lambda: setattr(config, "other", 2.0)),
        (lambda x: x.flag, set_flag),  # an attribute of an argument
        (lambda x: torch.exp(x) + ARRAY.size + np.pi, lambda: torch.manual_seed(0)),
    ],
)
def test_what_is_not_named_does_not_count(program, change):
    before = Named(program)
    change()
    assert before.hold()
    assert Named(program).key == before.key


def test_equal_numbers_are_no_change_and_objects_have_to_be_the_same():
    held = [1000, torch.zeros(2), True]
    before = Named(lambda: held)
    held[0] = int("1000")
    assert before.hold()
    held[2] = 1
    assert not before.hold()
    held[2] = True
    held[1] = torch.zeros(2)
    assert not before.hold()


def test_networks_buffers_are_known():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert {id(each) for each in Named(lambda x: net(x)).buffers} == {id(each) for each in net.buffers()}
