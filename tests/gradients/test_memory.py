"""What a model could keep of a sample, and what it must not do: every kind of memory by itself, without an engine."""

from __future__ import annotations

import array
import collections
import functools
import io
import itertools
import os
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

import modelmix as mm
from modelmix.gradients import memory
from modelmix.gradients.memory import Watch, WatchedFunction, content, tensor_content, weighted_sum
from modelmix.training import guard

KEPT: dict[str, float] = {}
TOP = 0.0


def same(value) -> bool:
    """Whether two looks at a value that nobody touches are equal."""
    return content(value, {}) == content(value, {})


class Plain:
    def __init__(self, **fields):
        vars(self).update(fields)


class Slotted:
    __slots__ = ("top",)

    def __init__(self):
        self.top = 0.0


class OneSlot:
    __slots__ = "top"

    def __init__(self):
        self.top = 0.0


class Inherits(Slotted):
    __slots__ = ()


class OfClass:
    top = 0.0

    @staticmethod
    def fixed():
        return KEPT

    @classmethod
    def of(cls):
        return KEPT

    @property
    def found(self):
        return KEPT


def names_a_global():
    return KEPT.get("top")


def names_a_number():
    return TOP


def inner():
    def within():
        return KEPT

    return within


def closure():
    top = [0.0]

    def function():
        return top

    return function, top


def defaults(top=[0.0]):  # noqa: B006, that is the attack
    return top


def keywords(*, top=[0.0]):  # noqa: B006, that is the attack
    return top


@functools.lru_cache
def cached(x):
    return x


def counting():
    top = 0.0
    while True:
        top += yield top


def iter_once():
    yield None


def advance(value):
    next(value)


def changes():
    """(what is looked at, how it is changed)"""
    t, flat = torch.zeros(3), torch.zeros(3000)
    yield "tensor", t, lambda: t.add_(1)
    data = torch.zeros(3)
    yield "data", data, lambda: data.data.__setitem__(1, 1.0)
    yield "entry of a long tensor", flat, lambda: flat.data.__setitem__(1500, 1e-6)
    for name, make in (
        ("list", lambda v: [v]),
        ("tuple", lambda v: (v,)),
        ("dict", lambda v: {"a": v}),
        ("key", lambda v: {v: 1}),
        ("set", lambda v: {v}),
        ("frozenset", lambda v: frozenset([v])),
        ("deque", lambda v: collections.deque([v])),
        ("userlist", lambda v: collections.UserList([v])),
        ("userdict", lambda v: collections.UserDict(a=v)),
        ("ordered", lambda v: collections.OrderedDict(a=v)),
        ("object", lambda v: Plain(a=v)),
        ("namespace", lambda v: types.SimpleNamespace(a=v)),
        ("partial", lambda v: functools.partial(print, v)),
        ("keyword", lambda v: functools.partial(print, end=v)),
    ):
        kept = torch.zeros(3000)
        yield name, make(kept), lambda kept=kept: kept.data.__setitem__(1500, 1e-6)
    items: list = []
    yield "length", items, lambda: items.append(0.0)
    numbers = np.zeros(5)
    yield "array", numbers, lambda: numbers.__setitem__(2, 1e-9)
    long = np.ones(5000)
    yield "entry of a long array", long, lambda: long.__setitem__(2500, 1 + 1e-12)
    order = [[1.0], [2.0]]
    yield "order", order, order.reverse
    objects = np.array([0.0, None], dtype=object)
    yield "array of objects", objects, lambda: objects.__setitem__(0, 1.0)
    raw = bytearray(4)
    yield "bytearray", raw, lambda: raw.__setitem__(0, 1)
    below = bytearray(4)
    yield "memoryview", memoryview(below), lambda: below.__setitem__(0, 1)
    typed = array.array("d", [0.0])
    yield "typed array", typed, lambda: typed.__setitem__(0, 1e-300)
    text, binary = io.StringIO(), io.BytesIO()
    yield "text", text, lambda: text.write("a")
    yield "binary", binary, lambda: binary.write(b"a")
    slotted, one, inherits = Slotted(), OneSlot(), Inherits()
    for s in (slotted, one, inherits):
        yield f"slots of {type(s).__name__}", s, lambda s=s: setattr(s, "top", 1.0)
    yield "class attribute", OfClass(), lambda: setattr(OfClass, "top", OfClass.top + 1)
    yield "class", OfClass, lambda: setattr(OfClass, "top", OfClass.top + 1)
    for name in ("fixed", "of", "found"):
        yield name, {name: vars(OfClass)[name]}, lambda: KEPT.update(top=len(KEPT) + KEPT.get("top", 0))
    yield "global", names_a_global, lambda: KEPT.update(top=KEPT.get("top", 0) + 1)
    yield "global number", names_a_number, lambda: globals().update(TOP=TOP + 1)
    yield "global of an inner function", inner, lambda: KEPT.update(top=KEPT.get("top", 0) + 1)
    function, top = closure()
    yield "closure", function, lambda: top.append(1.0)
    yield "defaults", defaults, lambda: defaults()[:].__class__ and defaults().append(1.0)
    yield "keyword defaults", keywords, lambda: keywords().append(1.0)

    def carrying():
        return carrying.top

    carrying.top = 0.0
    yield "attribute of a function", carrying, lambda: setattr(carrying, "top", 1.0)
    holder = Plain(top=0.0)
    holder.method = types.MethodType(carrying, holder)
    yield "method", holder.method, lambda: setattr(holder, "top", 1.0)
    generator = torch.Generator()
    yield "torch generator", generator, lambda: torch.rand(1, generator=generator)
    for name, rng in (("rng", np.random.default_rng(0)), ("random state", np.random.RandomState(0))):
        yield name, rng, rng.random if name == "rng" else rng.rand
    own = random.Random(0)
    yield "random", own, own.random
    for name, iterator in (
        ("count", itertools.count()),
        ("iterator", iter([1, 2, 3])),
        ("iterator of a tuple", iter((1, 2, 3))),
        ("iterator of a range", iter(range(3))),
        ("enumerate", enumerate([1, 2, 3])),
        ("zip", zip([1, 2, 3], [4, 5, 6], strict=True)),
        ("map", map(abs, [1, 2, 3])),
        ("filter", filter(None, [1, 2, 3])),
        ("generator", counting()),
    ):
        yield name, iterator, functools.partial(advance, iterator)
    plain = (None for _ in range(3))
    yield "generator without names of its own", plain, functools.partial(advance, plain)
    ending = iter_once()
    next(ending)
    yield "generator that ends", ending, functools.partial(next, ending, None)
    running = counting()
    next(running)
    yield "what a generator keeps", running, lambda: running.send(1.0)
    yield "cache", cached, lambda: cached(object())
    layer = nn.Linear(2, 2)
    yield "parameter", Plain(layer=layer), lambda: layer.weight.data.add_(1e-6)
    norm = nn.BatchNorm1d(2)
    yield "buffer", [norm], lambda: norm.running_mean.data.add_(1e-6)
    module = nn.Identity()
    yield "attribute of a module", [module], lambda: setattr(module, "top", 1.0)
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    yield "module within", [nested], lambda: nested[0][0].bias.data.add_(1e-6)
    cell = [None]

    def outer():
        def empty():
            return later

        cell[0] = empty
        yield
        later = torch.zeros(3)
        yield later

    filling = outer()
    next(filling)
    yield "cell that is filled", cell[0], functools.partial(next, filling)


CHANGES = {name: (value, change) for name, value, change in changes()}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_kept_is_seen(name):
    value, change = CHANGES[name]
    assert same(value)
    before = content(value, {})
    change()
    assert content(value, {}) != before
    assert same(value)


@pytest.mark.parametrize("value", [True, 1, 1.0, 1j, "1", b"1", None, float("nan")])
def test_plain_values_are_their_type_and_their_text(value):
    assert content(value, {}) == content(value, {}) == (type(value), repr(value))


def test_plain_values_of_other_types_are_others():
    values = [True, 1, 1.0, 1 + 0j, "1", b"1", None, -0.0, 0.0]
    assert len({content(v, {}) for v in values}) == len(values)


def test_what_hangs_deeper_than_is_looked_is_another_only_by_what_holds_it():
    t = torch.zeros(2)
    for deep in range(1, 15):
        value = t
        for _ in range(deep):
            value = [value]
        before = content(value, {})
        t.data += 1
        assert (content(value, {}) != before) == (deep <= 12), deep
    top = [1.0]
    assert content(top, {}, 0) == id(top)
    assert content(t, {}, 0) == (id(t), tensor_content(t))


def test_a_value_met_too_deep_is_looked_at_again_from_nearer():
    """A thing that hangs at the end of one path may hang near the beginning of another."""
    top = [0.0]
    far = top
    for _ in range(6):
        far = [far]
    value = (far, top)
    before = content(value, {})
    top[0] = 1.0
    assert content(value, {}) != before


def test_a_ring_is_looked_at_once():
    ring: list = []
    ring.append(ring)
    assert same(ring)
    own = Plain()
    own.own = own
    assert same(own)


def test_what_is_only_read_again_is_no_memory():
    cached(7)
    before = content(cached, {})
    cached(7)
    assert content(cached, {}) == before


def test_a_stream_that_is_closed_keeps_nothing():
    stream = io.BytesIO(b"a")
    before = content(stream, {})
    stream.close()
    assert content(stream, {}) != before
    assert same(stream)


def test_code_of_libraries_is_not_looked_through():
    seen = list(memory._inside(torch.nn.functional.relu))
    assert len(seen) == 3 + len(torch.nn.functional.relu.__closure__ or ())
    assert list(memory._inside(nn.Linear)) == []
    assert memory._is_library("torch.nn.functional")
    assert memory._is_library(None)
    assert not memory._is_library("torchish")
    assert not memory._is_library(__name__)


# Tensors.


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1023, 1024, 1025, 5000])
def test_every_entry_of_a_tensor_counts(kind, size):
    t = torch.zeros(size, dtype=kind)
    for at in {0, size // 2, size - 1}:
        before = tensor_content(t)
        t.data[at] = 1
        assert tensor_content(t) != before
        t.data[at] = 0
        assert tensor_content(t) == before


@pytest.mark.parametrize("size", [6, 1024, 4096, 4100])
def test_the_place_of_an_entry_counts(size):
    t = torch.zeros(size, dtype=torch.int32)
    found = set()
    places = {0, 1, 2, size // 2, size - 2, size - 1, min(1024, size - 1), min(2048, size - 1)}
    for at in places:
        t.data[at] = 5
        found.add(repr(tensor_content(t)))
        t.data[at] = 0
    assert len(found) == len(places)


@pytest.mark.parametrize("size", [5000, 100_000])
def test_the_last_bit_of_an_entry_counts(size):
    t = torch.randn(size, generator=torch.Generator().manual_seed(0))
    for at in (0, 1030, size - 1):
        before = tensor_content(t)
        t.data[at] = torch.nextafter(t[at], torch.tensor(9.0))
        assert tensor_content(t) != before


def test_a_write_that_leaves_the_values_counts_where_torch_sees_it():
    t = torch.zeros(3)
    before = tensor_content(t)
    t.add_(0)
    assert tensor_content(t) != before
    other = t.clone()
    assert tensor_content(other) != tensor_content(t)  # it lies elsewhere


@pytest.mark.parametrize(
    "t",
    [
        torch.zeros(0),
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.ones(3, dtype=torch.cfloat).conj(),
    ],
    ids=["empty", "meta", "sparse", "conjugate"],
)
def test_tensors_of_other_kinds_have_a_content(t):
    assert tensor_content(t) == tensor_content(t)
    assert same([t, torch.ones(2)])


def test_contents_belong_to_their_tensors():
    many = [torch.full((2,), float(i)) for i in range(4)] + [torch.zeros(0), torch.full((2,), 9.0)]
    assert memory.tensor_contents(many) == [tensor_content(t) for t in many]


# What may not change while a model trains.


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.frozen, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.frozen.requires_grad_(False)
        self.kept = [0.0]
        self.helper = Plain(layer=None)


@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: m.norm.running_mean.data.add_(1), "not trained"),
        (lambda m: m.frozen.weight.data.add_(1), "not trained"),
        (lambda m: m.register_buffer("more", torch.zeros(1)), "not trained"),
        (lambda m: delattr(m.norm, "running_mean"), "not trained"),
        (lambda m: m.layer.weight.requires_grad_(False), "frozen or removed"),
        (lambda m: m.frozen.weight.requires_grad_(True), "unfrozen or added"),
        (lambda m: setattr(m, "more", nn.Linear(1, 1)), "unfrozen or added"),
        (lambda m: delattr(m, "layer"), "frozen or removed"),
    ],
)
def test_what_is_not_trained_stays_as_it_was(change, rule, attributes):
    model = Holder()
    watch = Watch(model, attributes)
    watch.check()
    change(model)
    with pytest.raises(mm.UnprovedError, match=rule):
        watch.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.kept.append(1.0),
        lambda m: setattr(m, "more", 1.0),
        lambda m: delattr(m, "kept"),
        lambda m: setattr(m.helper, "layer", 1.0),
        lambda m: m.layer.register_forward_hook(lambda *a: None),
        lambda m: m.layer.register_forward_pre_hook(lambda *a: None),
        lambda m: setattr(type(m), "top", object()),
        lambda m: m.layer.register_full_backward_hook(lambda *a: None),
        lambda m: setattr(m.norm.running_mean, "kept", 1.0),
    ],
)
def test_attributes_are_watched_where_asked(change):
    model = Holder()
    careless, strict = Watch(model), Watch(model, attributes=True)
    strict.check()
    change(model)
    careless.check()
    with pytest.raises(mm.UnprovedError, match=r"attribute .* changed while samples ran"):
        strict.check()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_of_torch_are_its_own_business_and_others_are_not():
    layer = nn.Linear(2, 2)
    top: list = []
    layer.register_forward_hook(lambda *a: top.append(1))
    watch = Watch(layer, attributes=True)
    layer(torch.zeros(1, 2))
    with pytest.raises(mm.UnprovedError, match="hooks"):
        watch.check()
    for made in (nn.utils.weight_norm(nn.Linear(2, 2)), nn.LSTM(2, 2)):
        watch = Watch(made, attributes=True)
        with torch.no_grad():
            made(torch.zeros(1, 2))
        watch.check()


def test_weights_that_a_model_is_run_with_are_watched():
    values = {"weight": torch.zeros(2, 2)}
    watch = Watch(nn.Linear(2, 2), parameters=values)
    watch.check()
    values["weight"].data.add_(1e-6)
    with pytest.raises(mm.UnprovedError, match="writes to its parameter weight while it runs"):
        watch.check()


def test_trained_weights_may_change():
    model = Holder()
    watch = Watch(model, attributes=True)
    model.layer.weight.data.add_(1)
    watch.check()


def test_a_function_is_watched():
    function, top = closure()
    watch = WatchedFunction(function, "the criterion")
    watch.check()
    top.append(1.0)
    with pytest.raises(mm.UnprovedError, match="the criterion kept something"):
        watch.check()


# What a model must not do.


def norm(train=False, frozen=True, running=True, kind=nn.BatchNorm1d):
    return kind(2, track_running_stats=running).train(train).requires_grad_(not frozen)


@pytest.mark.parametrize("where", [lambda m: m, lambda m: nn.Sequential(nn.Sequential(nn.Linear(2, 2), m))])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm])
def test_a_batch_norm_may_stay_if_it_is_frozen_and_in_eval_mode(kind, where):
    guard.check_model(where(norm(kind=kind)))
    for wrong in ({"train": True}, {"frozen": False}, {"running": False}):
        with pytest.raises(mm.UnprovedError, match="mixes the samples of a batch"):
            guard.check_model(where(norm(kind=kind, **wrong)))
    half = norm(kind=kind)
    half.bias.requires_grad_(True)
    with pytest.raises(mm.UnprovedError):
        guard.check_model(where(half))


def test_an_instance_norm_may_not_keep_statistics():
    for train in (True, False):
        guard.check_model(nn.Sequential(nn.InstanceNorm1d(2).train(train)))
        with pytest.raises(mm.UnprovedError, match="running statistics"):
            guard.check_model(nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True).train(train)))
    guard.check_model(nn.GroupNorm(1, 2))


@pytest.mark.parametrize(
    ("world", "fine"), [("1", True), ("2", False), ("0", True), ("", True), ("x", True), (None, True)]
)
def test_one_process_trains(monkeypatch, world, fine):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setitem(os.environ, "WORLD_SIZE", world)
    if fine:
        guard.require_one_process()
    else:
        with pytest.raises(mm.UnprovedError, match="several processes"):
            guard.require_one_process()


@pytest.mark.parametrize(("there", "begun", "size", "fine"), [
    (True, True, 2, False), (True, True, 1, True), (True, False, 2, True), (False, True, 2, True),
])  # fmt: skip
def test_a_group_of_processes_is_refused(monkeypatch, there, begun, size, fine):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: there)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: begun, raising=False)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size, raising=False)
    if fine:
        guard.require_one_process()
    else:
        with pytest.raises(mm.UnprovedError, match="several processes"):
            guard.require_one_process()


def test_a_mechanism_is_of_this_model():
    plain, embedding = mm.Mechanism(1.0, 0.1), guard.EmbeddingMechanism.__new__(guard.EmbeddingMechanism)
    guard.check_mechanism(plain, 10)
    for wrong in (None, 1.0, "mechanism"):
        with pytest.raises(mm.ModelMixError, match="is not a Mechanism"):
            guard.check_mechanism(wrong, 10)
    with pytest.raises(mm.UnprovedError, match="releases two sums"):
        guard.check_mechanism(plain, 10, embedded=True)
    with pytest.raises(mm.UnprovedError, match="would not embed them"):
        guard.check_mechanism(embedding, 10)
    with pytest.raises(mm.ModelMixError, match="named laws"):
        guard.check_mechanism(mm.Mechanism(1.0, 0.1, law=lambda z: mm.Gaussian(z)), 10)


@pytest.mark.parametrize(("dimension", "coordinates", "p", "fine"), [
    (10, 10, 100, True), (9, 10, 100, False), (11, 10, 100, True), (4, 10, 4, True), (3, 10, 4, False),
    (None, 10, 100, True),
])  # fmt: skip
def test_an_account_counts_on_all_coordinates(dimension, coordinates, p, fine):
    mechanism = mm.Mechanism(1.0, 0.1, 1.0, p=p, dimension=dimension)
    if fine:
        guard.check_mechanism(mechanism, coordinates)
    else:
        with pytest.raises(mm.UnprovedError, match=f"counts on {dimension} coordinates and the model trains"):
            guard.check_mechanism(mechanism, coordinates)


def test_small_changes_of_two_entries_do_not_cancel():
    """Entries as words w and v: w + 2 v stays as it was when w rises by two and v falls by one."""
    words = torch.tensor([1_000_000, 2_000_000], dtype=torch.int32)
    found = set()
    for a in range(-40, 41):
        for b in range(-40, 41):
            t = (words + torch.tensor([a, b], dtype=torch.int32)).view(torch.float32)
            found.add(int(weighted_sum(t)))
    assert len(found) == 81 * 81
