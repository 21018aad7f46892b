"""What a step of a trainer and of a private loop does, and in which order; with stand-ins for everything around it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import modelmix as mm
from modelmix.accounting.mechanism import mixing_width
from modelmix.training import Randomness, Schedule, private, trainer
from modelmix.training.private import _equal, _identical, _Loop, _places_in
from modelmix.training.rules import Rule, State

ONE, TWO, THREE = (mm.Mechanism(z, q) for z, q in ((1.0, 0.2), (2.0, 0.2), (1.0, 0.5)))


def lines(*steps):
    ledger = mm.Ledger()
    for mechanism, count in steps:
        ledger = ledger.add(mechanism, count)
    return ledger


# The ledger of a trainer.


def account(ledger, step, mechanism, spent=None):
    run = SimpleNamespace(_ledger=ledger, _spent=spent or mm.Ledger())
    mm.Trainer._account(run, step, mechanism)
    return run._ledger


def test_every_step_has_one_line():
    assert account(mm.Ledger(), 1, ONE) == lines((ONE, 1))
    assert account(lines((ONE, 1)), 2, TWO) == lines((ONE, 1), (TWO, 1))
    spent = lines((THREE, 5))
    assert account(spent, 1, ONE, spent) == lines((THREE, 5), (ONE, 1))


def test_a_line_that_is_there_already_must_be_the_steps_own():
    written = lines((ONE, 2), (TWO, 1))
    for step, mechanism in ((1, ONE), (2, ONE), (3, TWO)):
        assert account(written, step, mechanism) is written
    for step, mechanism in ((1, TWO), (2, TWO), (3, ONE)):
        with pytest.raises(mm.UnprovedError, match=f"step {step} was accounted with another mechanism"):
            account(written, step, mechanism)
    spent = lines((THREE, 5))
    assert account(spent.then(written), 3, TWO, spent).steps == 8
    with pytest.raises(mm.UnprovedError):
        account(spent.then(written), 1, THREE, spent)


# The draws of a trainer.


@pytest.mark.parametrize("embedding", [None, object()])
@pytest.mark.parametrize("name", ["mix", "plain", "released"])
def test_every_draw_is_at_the_rate_of_its_own_step(name, embedding):
    rates = {4: 0.2, 5: 0.5, 6: 0.9}
    run = SimpleNamespace(
        step=3,
        _randomness=Randomness(5),
        mechanism_at=lambda k: mm.Mechanism(1.0, rates[k]),
        _rule=Rule(name),
        _embedding=embedding,
        _source=SimpleNamespace(n=200),
    )
    found = list(mm.Trainer._draws(run, 3))
    assert len(found) == 3
    for draw, (step, q) in zip(found, zip(Randomness(5).coming_steps(), rates.values(), strict=False), strict=True):
        if name == "released" and embedding is None:
            wanted = torch.cat([step.poisson_indices(f"sampling {i}", 200, q / 15) for i in range(15)])
        else:
            wanted = step.poisson_indices("sampling", 200, q)
        assert torch.equal(draw, wanted)


# The mechanism of a trainer's steps.


def test_a_threshold_gives_every_step_its_width():
    plan = mm.Plan.of(lines((mm.Mechanism(1.0, 0.2), 2), (mm.Mechanism(1.0, 0.4), 2)), population=100)
    lr, tau = Schedule.pieces({1: 0.1, 2: 0.2}), Schedule.pieces({1: 0.3, 4: 0.6})
    run = SimpleNamespace(_tau=None, _clip=2.0, _lr=lr)
    assert mm.Trainer._resolved(run, plan) is plan
    run._tau = tau
    resolved = mm.Trainer._resolved(run, plan)
    assert resolved.steps == 4
    for k, (eta, t, q) in enumerate([(0.1, 0.3, 0.2), (0.2, 0.3, 0.2), (0.2, 0.3, 0.4), (0.2, 0.6, 0.4)], 1):
        wanted = mixing_width(2.0, t, eta, q * 100)
        assert resolved.mechanism_at(k) == mm.Mechanism(1.0, q, wanted)
    assert mm.Trainer.mechanism_at(SimpleNamespace(_plan=resolved), 3) == resolved.mechanism_at(3)


# The order of a trainer's step.


class Proposed:
    def __init__(self, state, fails, told):
        self.state, self.fails, self.told = state, fails, told

    def accepted(self):
        self.told.append("accepted")
        if self.fails == "accepted":
            raise mm.ModelMixError("refused")
        return self.state


def stepped(monkeypatch, fails=""):
    told, seen = [], {}
    zero = torch.zeros(2, dtype=torch.float64)
    before, after = State(zero, zero, zero), State(zero + 1, zero, zero, step=1)

    def told_of(name, value=None):
        def call(*arguments):
            told.append(name)
            seen[name] = arguments
            if fails == name:
                raise mm.ModelMixError("refused")
            return value

        return call

    def propose(state, total, draws, **how):
        told.append("proposed")
        seen["proposed"] = (state, total, draws, how)
        return Proposed(after, fails, told)

    monkeypatch.setattr(trainer, "propose_step", propose)
    met = SimpleNamespace(to_cpu=told_of("met", "numbers"))
    random = SimpleNamespace(step=lambda: "draws", advance=told_of("advance"))
    run = SimpleNamespace(
        step=6, mechanism_at=lambda k: ("mechanism", k), _lr=SimpleNamespace(at=lambda k: ("eta", k)), _rule="rule",
        _randomness=random, _clipped_sum=told_of("summed", ("total", met)), _state=before, _clip=3.0,
        _plan=SimpleNamespace(expected_batch=lambda k: ("batch", k)), _coming=SimpleNamespace(look=told_of("look")),
        _diagnosed=told_of("diagnosed", "diagnostics"), _account=told_of("account"), _diagnostics=None,
    )  # fmt: skip
    try:
        mm.Trainer._one_step(run, "chunks")
    except mm.ModelMixError:
        assert fails
    else:
        assert not fails
    return run, told, seen, before, after


ORDER = ["summed", "proposed", "look", "met", "diagnosed", "account", "accepted", "advance"]


def test_a_step_is_of_the_coming_number_everywhere(monkeypatch):
    run, told, seen, before, after = stepped(monkeypatch)
    assert told == ORDER
    assert seen["summed"] == ("chunks", ("mechanism", 7), "draws")
    how = {
        "rule": "rule",
        "mechanism": ("mechanism", 7),
        "clip": 3.0,
        "eta": ("eta", 7),
        "expected_batch": ("batch", 7),
    }
    assert seen["proposed"] == (before, "total", "draws", how)
    assert seen["diagnosed"] == ("numbers",)
    assert seen["account"] == (7, ("mechanism", 7))
    assert run._state is after
    assert run._diagnostics == "diagnostics"


@pytest.mark.parametrize("fails", [name for name in ORDER if name != "proposed"])
def test_the_ledger_line_comes_before_the_state_and_the_key_moves_before_it_too(monkeypatch, fails):
    run, told, _, before, _ = stepped(monkeypatch, fails)
    assert told == ORDER[: ORDER.index(fails) + 1]
    assert run._state is before
    assert run._diagnostics is None


# What a trainer keeps and takes up again.


def kept(average=None, seeded=True, record=True):
    zero = torch.zeros(2, dtype=torch.float64)
    told = []
    state = State(zero, zero + 1, zero + 2, average, 4)
    run = SimpleNamespace(
        _price=lambda: None,
        _record=SimpleNamespace(keep=lambda *a: told.append(a)) if record else None, _state=state, step=4, _kept=None,
        _randomness=Randomness(3) if seeded else Randomness(), _diagnostics=SimpleNamespace(state=lambda: "d"),
        _metrics=["m"], _seconds=1.5, _arithmetic=lambda: "how", _ledger="ledger",
    )  # fmt: skip
    mm.Trainer._keep(run)
    return run, told


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("average", [None, torch.ones(2)])
def test_everything_is_kept_in_one_go(average, seeded):
    run, told = kept(average, seeded)
    ((ledger, arrays, meta),) = told
    assert ledger == "ledger"
    state = run._state
    wanted = {"last": state.last, "previous": state.previous, "velocity": state.velocity}
    assert arrays == (wanted if average is None else wanted | {"average": average})
    key = run._randomness.state()
    assert meta == {"step": 4, "randomness": key, "diagnostics": "d", "metrics": ["m"], "seconds": 1.5,
                    "arithmetic": "how" if seeded else ""}  # fmt: skip
    assert run._kept is state


def test_without_a_folder_nothing_is_kept():
    run, told = kept(record=False)
    assert not told
    assert run._kept is None


SPENT = lines((THREE, 2))


def restored(spent=SPENT, ema=None, ledger=None, arrays=None, seeded=True, how="how", repeats="digest", **changed):
    zero = torch.zeros(3, dtype=torch.float64)
    found = {"last": zero, "previous": zero + 1, "velocity": zero + 2} if arrays is None else arrays
    randomness = Randomness(8) if seeded else Randomness()
    meta = {"randomness": randomness.state(), "diagnostics": "d", "metrics": [{"step": 1}], "seconds": 2,
            "step": 3, "arithmetic": "how"}  # fmt: skip
    meta = {key: value for key, value in (meta | changed).items() if value is not ...}
    told = []

    run = SimpleNamespace(
        _device="cpu", _rule=Rule("mix", ema=ema), _flat=SimpleNamespace(size=3), _spent=spent, _ledger=spent,
        _plan=SimpleNamespace(ledger=spent.then(lines((ONE, 2), (TWO, 2)))), _arithmetic=lambda: how,
        _state=None, _kept=None,
        _diagnostics=SimpleNamespace(restore=told.append), _source=SimpleNamespace(repeatable=lambda: repeats),
        _write_model=lambda: told.append("written"), _randomness=None,
    )  # fmt: skip
    written = spent.then(lines((ONE, 2), (TWO, 1))) if ledger is None else ledger
    mm.Trainer._restore(run, (found, meta, written))
    assert told == ["d", "written"]
    assert run._ledger == written
    return run, randomness.state()


def test_a_run_goes_on_where_it_was_kept():
    run, key = restored()
    assert run._state.last.tolist() == [0.0] * 3
    assert run._state.previous.tolist() == [1.0] * 3
    assert run._state.velocity.tolist() == [2.0] * 3
    assert run._state.step == 3
    assert run._kept is run._state
    assert run._metrics == [{"step": 1}]
    assert run._seconds == 2.0
    assert run._randomness.state() == key
    nothing = SimpleNamespace(_ledger="ledger")
    mm.Trainer._restore(nothing, None)
    assert vars(nothing) == {"_ledger": "ledger"}


@pytest.mark.parametrize(
    "different", [{"seeded": False}, {"how": "another"}, {"repeats": None}, {"seeded": False, "how": "another"}]
)
def test_noise_is_made_again_only_for_the_same_computation(different):
    run, key = restored(**different)
    assert run._randomness.state() != key


@pytest.mark.parametrize(
    "ledger",
    [
        lines((ONE, 2), (TWO, 1)), lines((THREE, 1), (ONE, 2)), lines((THREE, 2), (TWO, 1)),
        lines((THREE, 2), (ONE, 3)), lines((THREE, 2), (ONE, 2), (TWO, 3)), lines((THREE, 3), (ONE, 1)),
        replace(lines((THREE, 2), (ONE, 2), (TWO, 1)), unproved=("something",)),
    ],
)  # fmt: skip
def test_a_ledger_of_another_run_is_refused(ledger):
    with pytest.raises(mm.ModelMixError, match="the ledger is not of this run"):
        restored(ledger=ledger)


def test_ledgers_that_are_ahead_or_full_are_of_this_run():
    for steps in ((), ((ONE, 1),), ((ONE, 2), (TWO, 2))):
        restored(ledger=SPENT.then(lines(*steps)))
    restored(spent=mm.Ledger(), ledger=lines((ONE, 2)))


@pytest.mark.parametrize(
    "sizes",
    [
        {"last": 3, "previous": 3},
        {"last": 3, "previous": 3, "velocity": 2},
        {"last": 3, "previous": 3, "velocity": 3, "average": 3},
    ],
)
def test_a_checkpoint_of_another_model_is_refused(sizes):
    with pytest.raises(mm.ModelMixError, match="the checkpoint is not of this model"):
        restored(arrays={name: torch.zeros(size) for name, size in sizes.items()})


def test_an_average_is_taken_up_where_there_is_one():
    arrays = {name: torch.zeros(3) for name in ("last", "previous", "velocity", "average")}
    run, _ = restored(ema=0.9, arrays=arrays)
    assert run._state.average is arrays["average"]
    with pytest.raises(mm.ModelMixError, match="the checkpoint is not of this model"):
        restored(ema=0.9)


@pytest.mark.parametrize("changed", [
    {"randomness": ...}, {"diagnostics": ...}, {"metrics": ...}, {"metrics": [3]}, {"seconds": "x"}, {"step": None},
    {"arithmetic": ...}, {"step": "x"},
])  # fmt: skip
def test_a_checkpoint_that_cannot_be_read_is_refused(changed):
    with pytest.raises(mm.ModelMixError, match="the checkpoint is not readable"):
        restored(**changed)


# A private loop.


def test_only_whole_unchanged_tensors_of_the_batch_are_of_it():
    x, y = torch.randn(3, 2), torch.tensor([0, 1, 1])
    batch = ({"a": x, "n": 4}, y)
    assert _places_in(x, batch)[1] == [{0}]
    assert _places_in((y, x.clone()), batch)[1] == [{1}, {0}]
    assert _places_in(x, (x, x.clone()))[1] == [{0, 1}]
    assert _places_in((y, x), batch)[0] != _places_in([y, x], batch)[0]
    for other in (x[:2], x + 1, x.double(), x.t(), (), 4, "x", (x, 4), (x, x + 1), None, torch.zeros(0)):
        assert _places_in(other, batch) is None
    assert _places_in(x, None) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_equal_tensors_have_one_shape_one_type_and_the_same_entries(kind):
    t = torch.tensor([1, 2, 3]).to(kind)
    assert _equal(t, t.clone())
    for other in (t + 1, t[:2], t[None], t.double() if kind == torch.float32 else t.int(), t.flip(0)):
        assert not _equal(t, other)


def test_what_is_no_number_is_equal_to_itself():
    nan = torch.tensor([1.0, float("nan")])
    assert _equal(nan, nan.clone())
    assert not _equal(nan, torch.tensor([1.0, 2.0]))
    assert not _equal(torch.tensor([1.0, 2.0]), nan)
    assert not _equal(nan, torch.tensor([2.0, float("nan")]))


def test_outputs_are_the_very_ones():
    a, b = torch.zeros(1), torch.zeros(1)
    assert _identical((a, b), (a, b))
    assert _identical({"x": a}, [a])
    for given in ((b, a), (a,), (a, b, a), (a, b.clone()), ()):
        assert not _identical(given, (a, b))


def loop(mechanism=ONE, tau=None, **more):
    fields = {
        "tau": tau, "clip": 2.0, "coming_mechanism": lambda: mechanism, "expected_batch": lambda m: m.sample_rate * 50,
    }  # fmt: skip
    return SimpleNamespace(**(fields | more))


def test_a_loop_runs_what_is_planned():
    assert _Loop.step_mechanism(loop(), 0.1) is ONE
    mixed = mm.Mechanism(1.0, 0.2, 3.0)
    width = mixing_width(2.0, 1.2, 0.5, 10.0)
    assert width == 12.0
    assert _Loop.step_mechanism(loop(mixed, 1.2), 0.5) == mm.Mechanism(1.0, 0.2, 12.0)
    edge = mm.Mechanism(1.0, 0.2, 12.0)
    assert _Loop.step_mechanism(loop(edge, 1.2), 0.5) == edge
    assert _Loop.step_mechanism(loop(replace(edge, mixing_width=12.0 * (1 + 1e-13)), 1.2), 0.5) == edge
    for wider in (12.0 * (1 + 1e-9), 24.0):
        with pytest.raises(mm.BudgetExceeded, match="mixes over"):
            _Loop.step_mechanism(loop(replace(edge, mixing_width=wider), 1.2), 0.5)


def test_the_coming_mechanism_is_the_plans_after_what_was_spent():
    asked = []
    plan = SimpleNamespace(mechanism_at=lambda k: asked.append(k) or "found", spent=lines((THREE, 4)), population=50)
    run = SimpleNamespace(ledger=lines((THREE, 4), (ONE, 2)), plan=plan)
    assert _Loop.coming_mechanism(run) == "found"
    assert asked == [3]
    assert _Loop.expected_batch(run, THREE) == 25.0


class Loop(SimpleNamespace):
    _before = _Loop._before
    _take_on = _Loop._take_on
    _require_goes_on = _Loop._require_goes_on
    take_on = _Loop.take_on


def planned_loop(spent=None, own=None, steps=10):
    plan = mm.Plan.of(lines((ONE, steps)), population=100, spent=spent or mm.Ledger())
    claim = replace(plan.ledger, phases=())
    before = plan.spent.then(claim)
    runs = {"mine": math.inf}
    return Loop(
        plan=plan, claim=claim, earlier=before, own=own or claim, planned=plan.guarantee(), runs=runs, base=None
    )  # fmt: skip


def state_of(ledger, run="other", spent=None):
    """Of a loop whose plan was shorter than those here."""
    spent = spent or mm.Ledger()
    plan = mm.Plan.of(lines((ONE, 1)), population=100, spent=spent)
    return {"ledger": ledger.to_json(), "run": run, "spent": spent.to_json(), "plan": plan.as_dict()}


def test_what_another_loop_ran_is_counted_once():
    run = planned_loop()
    run.take_on(state_of(lines((ONE, 3))))
    assert run.earlier.steps == 3
    assert set(run.runs) == {"mine", "other"}
    run.take_on(state_of(lines((ONE, 3))))
    assert run.earlier.steps == 3
    run.take_on(state_of(lines((ONE, 3)), run="mine"))
    assert run.earlier.steps == 3
    run.take_on(state_of(lines((ONE, 2)), run="third"))
    assert run.earlier.steps == 5
    with pytest.raises(mm.BudgetExceeded, match="what has run costs"):
        run.take_on(state_of(lines((TWO, 1), (THREE, 900)), run="fourth"))
    assert run.earlier.steps == 5
    assert "fourth" not in run.runs


def test_what_was_spent_is_counted_once():
    spent = lines((ONE, 4))

    def taken(*states):
        run = planned_loop(spent, steps=40)
        for name, (ledger, of) in enumerate(states):
            run.take_on(state_of(ledger, str(name), of))
        return run.earlier.steps

    ran, more = spent.then(lines((ONE, 3))), spent.then(lines((ONE, 2)))
    assert taken((ran, spent)) == 7
    # Of a second state all is new, even if it begins alike.
    assert taken((ran, spent), (more, spent)) == 7 + 6
    # A plan that counts what was spent otherwise is not the one this loop goes on with.
    with pytest.raises(mm.BudgetExceeded, match="does not go on with"):
        taken((ran, mm.Ledger()))
    # What does not begin with what was spent did not count it.
    assert taken((lines((ONE, 3)), spent)) == 4 + 3


@pytest.mark.parametrize("count", [0, 4])
def test_one_step_that_cost_more_than_a_planned_one_is_too_much(count):
    spent = lines((ONE, count)) if count else mm.Ledger()
    dearer, cheaper = mm.Mechanism(0.95, 0.2), mm.Mechanism(1.05, 0.2)
    run = planned_loop(spent)
    with pytest.raises(mm.BudgetExceeded, match="what has run costs"):
        run.take_on(state_of(spent.then(lines((dearer, 1))), spent=spent))
    assert run.earlier.steps == count
    run.take_on(state_of(spent.then(lines((cheaper, 1))), spent=spent))
    assert run.earlier.steps == count + 1


def test_a_state_that_claims_something_else_is_refused():
    for changed in ({"adjacency": "add-or-remove"}, {"unit": "person"}):
        run = planned_loop()
        with pytest.raises(mm.ModelMixError, match="a run that claims something else"):
            run.take_on(state_of(replace(lines((ONE, 1)), population=100, **changed)))
        assert set(run.runs) == {"mine"}


def test_a_state_without_proof_is_refused():
    with pytest.raises(mm.UnprovedError, match="was not private training"):
        planned_loop().take_on(state_of(replace(lines((ONE, 1)), unproved=("something",))))


# The order of a private loop's step.


def told_of_changed(changed):
    def require():
        if changed:
            raise mm.UnprovedError("weights are those of a step", "they are others.", "Leave them.")

    return require


def completed(monkeypatch, rule="mix", fails="", changed=False, decay=None):
    told, seen = [], {}
    zero = torch.zeros(2, dtype=torch.float64)
    after = State(zero + 1, zero, zero)
    layer = torch.nn.Linear(1, 1).double()
    layer.bias.requires_grad_(False)

    def told_of(name, value=None):
        def call(*arguments, **named):
            told.append(name)
            seen[name] = (arguments, named)
            if fails == name:
                raise mm.ModelMixError("refused")
            return value

        return call

    monkeypatch.setattr(private, "take_step", told_of("taken", after))
    monkeypatch.setattr(private, "noise", told_of("noise", torch.tensor([10.0], dtype=torch.float64)))
    run = SimpleNamespace(
        total=torch.tensor([4.0], dtype=torch.float64), added=3, own=mm.Ledger(), clip=2.0, state="before",
        rule=Rule(rule, "paper", momentum=0.5), model=layer,
        require_own_weights=told_of_changed(changed),
        wrote=lambda: seen.update(wrote=list(told)),
        step_mechanism=lambda eta: seen.update(eta=eta) or ONE, expected_batch=lambda m: 5.0,
        randomness=SimpleNamespace(step=lambda: "draws", advance=told_of("advance")), save_ledger=told_of("saved"),
        flat=SimpleNamespace(
            write=told_of("write"),
            size=1,
            views=lambda v: {"weight": v.reshape(1, 1)},
        ),
    )  # fmt: skip
    group = {"lr": 0.25} | ({} if decay is None else {"weight_decay": decay})
    optimizer = SimpleNamespace(_loop=run, param_groups=[group], _original=SimpleNamespace(step=told_of("original")))
    try:
        private.PrivateOptimizer._complete(optimizer)
    except mm.ModelMixError:
        assert fails or changed
    return run, told, seen, after


@pytest.mark.parametrize("decay", [None, 0.7])
def test_a_loop_takes_the_trainers_step(monkeypatch, decay):
    run, told, seen, after = completed(monkeypatch, decay=decay)
    assert told == ["saved", "advance", "taken", "write"]
    assert seen["eta"] == 0.25
    (state, total, draws), how = seen["taken"]
    assert (state, total.tolist(), draws) == ("before", [4.0], "draws")
    rule = Rule("mix", "paper", 0.5, decay or 0.0)
    assert how == {"rule": rule, "mechanism": ONE, "clip": 2.0, "eta": 0.25, "expected_batch": 5.0}
    assert run.state is after
    assert seen["write"][0] == (after.last,)
    assert run.own == lines((ONE, 1))
    assert run.total.tolist() == [0.0]
    assert run.added == 0
    assert seen["wrote"] == told


def test_without_mixing_the_optimizer_is_given_the_noisy_mean(monkeypatch):
    run, told, seen, _ = completed(monkeypatch, rule="plain")
    assert seen["wrote"] == told
    assert told == ["saved", "advance", "noise", "original"]
    assert seen["noise"][0] == (ONE, "draws", 1)
    assert run.model.weight.grad.tolist() == [[4.0 / 5.0 + 2.0 / 5.0 * 10.0]]
    assert run.model.bias.grad is None
    assert run.own == lines((ONE, 1))
    assert run.total.tolist() == [0.0]
    assert run.added == 0


@pytest.mark.parametrize("fails", ["saved", "advance", "taken", "write"])
def test_the_line_comes_first_and_a_sum_is_used_once(monkeypatch, fails):
    run, told, _, _ = completed(monkeypatch, fails=fails)
    order = ["saved", "advance", "taken", "write"]
    assert told == order[: order.index(fails) + 1]
    assert run.own == lines((ONE, 1))
    assert run.total.tolist() == [0.0]
    assert run.added == 0
    assert (run.state == "before") == (fails != "write")


@pytest.mark.parametrize("rule", ["mix", "plain"])
def test_weights_changed_from_outside_end_the_step_before_its_line(monkeypatch, rule):
    run, told, _, _ = completed(monkeypatch, rule=rule, changed=True)
    assert not told
    assert run.own == mm.Ledger()
