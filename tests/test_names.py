"""What the Python of a program names: changes of it are seen, those of what it does not name are none."""

import functools
import itertools
import json
from collections import ChainMap, deque
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from pyro_sparsegp.program.names import Named, name_of

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
        (lambda x: helper(x), set_flag, "flag"),
        (lambda x: [k for k in x if k > flag], set_flag, "flag"),
        (lambda x: x + BOX[1], lambda: BOX.__setitem__(1, BOX[1] + 1), "BOX"),
        (lambda x: x + BOX[-1], lambda: BOX.append(1), "BOX"),
        (lambda x: x + TABLE["a"][0], lambda: TABLE["a"].__setitem__(0, TABLE["a"][0] + 1), "TABLE"),
        (lambda x: x + ARRAY.sum(), lambda: ARRAY.__iadd__(1), "ARRAY"),
        (lambda x: x * config.scale, lambda: setattr(config, "scale", config.scale + 1), "config.scale"),
        (lambda x: x * NESTED.inner.value, lambda: setattr(NESTED.inner, "value", object()), "NESTED.inner.value"),
        (lambda x: OBJECT(x), lambda: setattr(OBJECT, "count", OBJECT.count + 1), "OBJECT.count"),
        (lambda x: OBJECT.step(x), lambda: setattr(Counts, "total", Counts.total + 1), "OBJECT.total"),
        (lambda x: x + OBJECT.half, lambda: setattr(OBJECT, "count", OBJECT.count + 1), "OBJECT.count"),
        (OBJECT.step, lambda: setattr(OBJECT, "count", OBJECT.count + 1), "model"),
        (PARTIAL, lambda: setattr(helper, "__defaults__", (helper.__defaults__[0] + 1,)), "model.func"),
        (NETWORK, lambda: setattr(NETWORK, "depth", NETWORK.depth + 1), "model.depth"),
        (NETWORK, lambda: NETWORK.net.append(torch.nn.ReLU()), "model._modules"),
        (NETWORK, lambda: NETWORK.net.__setitem__(1, torch.nn.Tanh()), "model._modules"),
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


class Slots:
    __slots__ = ("value",)


def test_changes_in_places_of_many_kinds_are_seen():
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1))
    queue, table, slots, options = deque([1]), ChainMap({"a": 1}), Slots(), SimpleNamespace(q=[{"a": Slots()}])
    many, acts, big = [*range(1000)], [], np.zeros(10_000)
    slots.value = options.q[0]["a"].value = 1
    net[0].register_forward_hook(lambda *of: acts.append(1))

    def program(x, given):
        import json as own

        x = net(x) * queue[0] * table["a"] * slots.value * options.q[0]["a"].value * many[-1] * big[0] * given.value
        return own.scanner, x

    given = SimpleNamespace(value=1)
    changes = [
        net.eval,
        lambda: setattr(net[1], "p", 0.2),
        lambda: net[0].register_forward_hook(print),
        lambda: setattr(net[0], "weight", torch.nn.Parameter(torch.zeros(1, 1))),
        lambda: setattr(net[0].bias, "requires_grad", False),
        lambda: net[0].weight.register_hook(torch.neg),
        lambda: setattr(net, "forward", torch.neg),
        lambda: queue.appendleft(2),
        lambda: table.__setitem__("a", 2),
        lambda: setattr(slots, "value", 2),
        lambda: setattr(options.q[0]["a"], "value", 2),
        lambda: many.__setitem__(-1, 2),
        lambda: acts.append(1),
        lambda: big.__setitem__(-1, 1.0),
        lambda: setattr(given, "value", 2),
        lambda: setattr(json, "scanner", None),
    ]
    scanner = json.scanner
    for number, change in enumerate(changes):
        before = Named(program, {"given": given})
        assert before.hold({"given": given})
        change()
        assert not before.hold({"given": given}), number
    assert not Named(program, {"given": given}).hold({"given": SimpleNamespace(value=2)})
    json.scanner = scanner


def test_what_shows_no_change_is_told():
    count, generator, large = itertools.count(), torch.Generator(), [None] * 200_000
    unseen = Named(lambda x: x + next(count) + torch.rand(1, generator=generator) + large[0]).unseen
    said = {"an iterator", "a generator of random numbers", "a container of 200000 items"}
    assert ({name_of(place) for place in unseen}, {*unseen.values()}) == ({"count", "generator", "large"}, said)


def test_sparse_tensors_are_left_alone():
    sparse, dense = torch.eye(3).to_sparse(), torch.eye(3)
    assert [each.layout for each in Named(lambda x: sparse @ dense @ x).tensors] == [torch.strided]


def test_networks_buffers_are_known():
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert {id(each) for each in Named(lambda x: net(x)).tensors} == {id(each) for each in net.buffers()}
