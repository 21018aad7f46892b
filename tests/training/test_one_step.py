"""What a step of a trainer and of a private loop does, and in which order; with stand-ins for everything around it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import modelmix as mm
from modelmix.accounting.mechanism import mixing_width
from modelmix.training import Randomness, Rule, Schedule, State, step
from modelmix.training.checkpoint import RunFiles
from modelmix.training.loop import PrivateLoop
from modelmix.training.loop_account import LoopAccount
from modelmix.training.loop_pass import are_identical, is_equal, places_in
from modelmix.training.private import PrivateOptimizer
from modelmix.training.step import PrivateStep, RunAccount
from modelmix.training.task import resolve_plan

RULE = Rule("plain")
ONE, TWO, THREE = (mm.Mechanism(z, q) for z, q in ((1.0, 0.2), (2.0, 0.2), (1.0, 0.5)))


def lines(*steps):
    ledger = mm.Ledger()
    for mechanism, count in steps:
        ledger = ledger.add(mechanism, count)
    return ledger


# The ledger of a trainer.


def account(ledger, step, mechanism, spent=None):
    run = RunAccount(ledger, (spent or mm.Ledger()).steps)
    run.add(step, mechanism)
    return run.ledger


def test_every_step_has_one_line():
    assert account(mm.Ledger(), 1, ONE) == lines((ONE, 1))
    assert account(lines((ONE, 1)), 2, TWO) == lines((ONE, 1), (TWO, 1))
    spent = lines((THREE, 5))
    assert account(spent, 1, ONE, spent) == lines((THREE, 5), (ONE, 1))


def test_a_line_that_is_there_already_must_be_the_steps_own():
    written = lines((ONE, 2), (TWO, 1))
    for k, mechanism in ((1, ONE), (2, ONE), (3, TWO)):
        assert account(written, k, mechanism) is written
    for k, mechanism in ((1, TWO), (2, TWO), (3, ONE)):
        with pytest.raises(mm.UnprovedError, match=f"step {k} was accounted with another mechanism"):
            account(written, k, mechanism)
    spent = lines((THREE, 5))
    assert account(spent.then(written), 3, TWO, spent).steps == 8
    with pytest.raises(mm.UnprovedError):
        account(spent.then(written), 1, THREE, spent)


# The draws of a trainer.


def test_every_draw_is_at_the_rate_of_its_own_step():
    plan = mm.Plan.of(lines((ONE, 3), (mm.Mechanism(1.0, 0.5), 1), (mm.Mechanism(1.0, 0.9), 2)), population=200)
    zero = torch.zeros(2, dtype=torch.float64)
    run = PrivateStep(plan, Rule("plain"), 1.0, State.start(zero, step=2), Randomness(5), RunAccount(mm.Ledger(), 0))
    found = list(run.coming(200, 3))
    assert len(found) == 3
    for (draws, draw), again, q in zip(found, Randomness(5).coming_steps(), (0.2, 0.5, 0.9), strict=False):
        assert draws.same_as(again)
        assert torch.equal(draw, again.poisson_indices("sampling", 200, q))


# The mechanism of a trainer's steps.


def test_a_threshold_gives_every_step_its_width():
    plan = mm.Plan.of(lines((mm.Mechanism(1.0, 0.2), 2), (mm.Mechanism(1.0, 0.4), 2)), population=100)
    lr, tau = Schedule.pieces({1: 0.1, 2: 0.2}), Schedule.pieces({1: 0.3, 4: 0.6})
    assert resolve_plan(plan, 2.0, lr, None) is plan
    resolved = resolve_plan(plan, 2.0, lr, tau)
    assert resolved.steps == 4
    for k, (eta, t, q) in enumerate([(0.1, 0.3, 0.2), (0.2, 0.3, 0.2), (0.2, 0.3, 0.4), (0.2, 0.6, 0.4)], 1):
        wanted = mixing_width(2.0, t, eta, q * 100)
        assert resolved.mechanism_at(k) == mm.Mechanism(1.0, q, wanted)


# The order of a step.


class Proposed:
    def __init__(self, state, fails, told):
        self.state, self.fails, self.told = state, fails, told

    def accepted(self):
        self.told.append("accepted")
        if self.fails == "accepted":
            raise mm.ModelMixError("refused")
        return self.state


def stepped(monkeypatch, fails="", mechanism=None):
    told, seen = [], {}
    zero = torch.zeros(2, dtype=torch.float64)
    before, after = State(zero, zero, zero, step=6), State(zero + 1, zero, zero, step=7)

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

    monkeypatch.setattr(step, "propose_step", propose)
    random = SimpleNamespace(step=lambda: "draws", advance=told_of("advance"))
    plan = mm.Plan.of(lines((ONE, 6), (TWO, 1), (THREE, 1)), population=50)
    account = SimpleNamespace(add=told_of("account"), taken=lambda state: state.step)
    run = PrivateStep(plan, RULE, 3.0, before, random, account)
    try:
        run.take("total", 0.25, mechanism, meanwhile=told_of("meanwhile"))
    except mm.ModelMixError:
        assert fails
    else:
        assert not fails
    return run, told, seen, before, after


ORDER = ["proposed", "meanwhile", "account", "accepted", "advance"]


def test_a_step_is_of_the_coming_number_everywhere(monkeypatch):
    run, told, seen, before, after = stepped(monkeypatch)
    assert told == ORDER
    how = {"rule": RULE, "mechanism": TWO, "clip": 3.0, "eta": 0.25, "expected_batch": 10.0}
    assert seen["proposed"] == (before, "total", "draws", how)
    assert seen["account"] == (7, TWO)
    assert run.state is after


def test_a_step_runs_and_accounts_the_mechanism_it_is_given(monkeypatch):
    _, _, seen, _, _ = stepped(monkeypatch, mechanism=THREE)
    assert seen["proposed"][3]["mechanism"] is seen["account"][1] is THREE
    assert seen["proposed"][3]["expected_batch"] == 25.0


@pytest.mark.parametrize("fails", [name for name in ORDER if name != "proposed"])
def test_the_ledger_line_comes_before_the_state_and_the_key_moves_before_it_too(monkeypatch, fails):
    run, told, _, before, _ = stepped(monkeypatch, fails)
    assert told == ORDER[: ORDER.index(fails) + 1]
    assert run.state is before


def test_a_mean_is_noisy_accounted_and_never_mixed(monkeypatch):
    zero, told = torch.zeros(3, dtype=torch.float64), []
    random = Randomness(4)
    noise = random.step().gaussian("noise", 3)
    account = SimpleNamespace(add=lambda *line: told.append((line, random.state())), taken=lambda state: state.step)
    plan = mm.Plan.of(lines((ONE, 1), (TWO, 1)), population=50)
    run, key = PrivateStep(plan, Rule("plain"), 3.0, State.start(zero), random, account), random.state()
    total = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(run.release_mean(total), total / 10 + 3.0 / 10 * noise, rtol=1e-15, atol=0)
    assert told == [((1, ONE), key)]
    assert random.state() != key
    assert run.number == 1
    with pytest.raises(mm.UnprovedError, match="is not mixed"):
        run.release_mean(total, mm.Mechanism(1.0, 0.2, 1.0))
    assert len(told) == 1


# What a trainer keeps and takes up again.


def kept(average=None, seeded=True, record=True):
    zero = torch.zeros(2, dtype=torch.float64)
    told = []
    state = State(zero, zero + 1, zero + 2, average, 4)
    run = SimpleNamespace(
        record=SimpleNamespace(keep=lambda *a: told.append(a)) if record else None, _kept=None,
        _step=SimpleNamespace(
            state=state, randomness=Randomness(3) if seeded else Randomness(), account=SimpleNamespace(ledger="ledger")
        ),
        diagnostics=SimpleNamespace(state=lambda: "d"), rows=lambda: ["m"], seconds=1.5,
        _task=SimpleNamespace(arithmetic=lambda: "how"),
    )  # fmt: skip
    RunFiles.keep(run)
    return run, told


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("average", [None, torch.ones(2)])
def test_everything_is_kept_in_one_go(average, seeded):
    run, told = kept(average, seeded)
    ((ledger, arrays, meta),) = told
    assert ledger == "ledger"
    state = run._step.state
    wanted = {"last": state.last, "previous": state.previous, "velocity": state.velocity}
    assert arrays == (wanted if average is None else wanted | {"average": average})
    key = run._step.randomness.state()
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
        _step=SimpleNamespace(
            rule=Rule("mix", ema=ema), state=None, randomness=None, account=SimpleNamespace(ledger=spent),
            plan=SimpleNamespace(ledger=spent.then(lines((ONE, 2), (TWO, 2))), spent=spent),
        ),
        _task=SimpleNamespace(
            gradients=SimpleNamespace(device="cpu"), flat=SimpleNamespace(size=3), arithmetic=lambda: how,
            source=SimpleNamespace(repeatable=lambda: repeats),
        ),
        _kept=None, diagnostics=SimpleNamespace(restore=told.append),
    )  # fmt: skip
    written = spent.then(lines((ONE, 2), (TWO, 1))) if ledger is None else ledger
    RunFiles._restore(run, (found, meta, written))
    assert told == ["d"]
    assert run._step.account.ledger == written
    run._step.account.add(4, TWO)
    assert run._step.account.ledger.steps == written.steps + (written.steps < spent.steps + 4)
    return run, randomness.state()


def test_a_run_goes_on_where_it_was_kept():
    run, key = restored()
    assert run._step.state.last.tolist() == [0.0] * 3
    assert run._step.state.previous.tolist() == [1.0] * 3
    assert run._step.state.velocity.tolist() == [2.0] * 3
    assert run._step.state.step == 3
    assert run._kept is run._step.state
    assert run._rows == [{"step": 1}]
    assert run.seconds == 2.0
    assert run._step.randomness.state() == key
    nothing = SimpleNamespace(_ledger="ledger")
    RunFiles._restore(nothing, None)
    assert vars(nothing) == {"_ledger": "ledger"}


@pytest.mark.parametrize(
    "different", [{"seeded": False}, {"how": "another"}, {"repeats": None}, {"seeded": False, "how": "another"}]
)
def test_noise_is_made_again_only_for_the_same_computation(different):
    run, key = restored(**different)
    assert run._step.randomness.state() != key


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
    assert run._step.state.average is arrays["average"]
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
    assert places_in(x, batch)[1] == [{0}]
    assert places_in((y, x.clone()), batch)[1] == [{1}, {0}]
    assert places_in(x, (x, x.clone()))[1] == [{0, 1}]
    assert places_in((y, x), batch)[0] != places_in([y, x], batch)[0]
    for other in (x[:2], x + 1, x.double(), x.t(), (), 4, "x", (x, 4), (x, x + 1), None, torch.zeros(0)):
        assert places_in(other, batch) is None
    assert places_in(x, None) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_equal_tensors_have_one_shape_one_type_and_the_same_entries(kind):
    t = torch.tensor([1, 2, 3]).to(kind)
    assert is_equal(t, t.clone())
    for other in (t + 1, t[:2], t[None], t.double() if kind == torch.float32 else t.int(), t.flip(0)):
        assert not is_equal(t, other)


def test_what_is_no_number_is_equal_to_itself():
    nan = torch.tensor([1.0, float("nan")])
    assert is_equal(nan, nan.clone())
    assert not is_equal(nan, torch.tensor([1.0, 2.0]))
    assert not is_equal(torch.tensor([1.0, 2.0]), nan)
    assert not is_equal(nan, torch.tensor([2.0, float("nan")]))


def test_outputs_are_the_very_ones():
    a, b = torch.zeros(1), torch.zeros(1)
    assert are_identical((a, b), (a, b))
    assert are_identical({"x": a}, [a])
    for given in ((b, a), (a,), (a, b, a), (a, b.clone()), ()):
        assert not are_identical(given, (a, b))


def loop(mechanism=ONE, tau=None, **more):
    step = SimpleNamespace(clip=2.0, mechanism=mechanism, expected_batch=lambda m: m.sample_rate * 50)
    return SimpleNamespace(**({"tau": tau, "step": step} | more))


def test_a_loop_runs_what_is_planned():
    assert PrivateLoop.mechanism_for(loop(), 0.1) is ONE
    mixed = mm.Mechanism(1.0, 0.2, 3.0)
    width = mixing_width(2.0, 1.2, 0.5, 10.0)
    assert width == 12.0
    assert PrivateLoop.mechanism_for(loop(mixed, 1.2), 0.5) == mm.Mechanism(1.0, 0.2, 12.0)
    edge = mm.Mechanism(1.0, 0.2, 12.0)
    assert PrivateLoop.mechanism_for(loop(edge, 1.2), 0.5) == edge
    assert PrivateLoop.mechanism_for(loop(replace(edge, mixing_width=12.0 * (1 + 1e-13)), 1.2), 0.5) == edge
    for wider in (12.0 * (1 + 1e-9), 24.0):
        with pytest.raises(mm.BudgetExceeded, match="mixes over"):
            PrivateLoop.mechanism_for(loop(replace(edge, mixing_width=wider), 1.2), 0.5)


def test_the_coming_mechanism_is_the_plans_after_what_was_spent():
    plan = mm.Plan.of(lines((ONE, 2), (THREE, 1)), population=50, spent=lines((THREE, 4)))
    zero = torch.zeros(1, dtype=torch.float64)
    run = PrivateStep(plan, Rule("plain"), 1.0, State.start(zero, step=2), Randomness(1), RunAccount(plan.spent, 4))
    assert run.mechanism is plan.phases[1].mechanism
    assert run.expected_batch(THREE) == 25.0


def planned_loop(spent=None, own=None, steps=10):
    plan = mm.Plan.of(lines((ONE, steps)), population=100, spent=spent or mm.Ledger())
    run = LoopAccount(plan, False, {"assumed": (), "excluded": ()}, None)
    run.runs = {"mine": math.inf}
    return run


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

    account = SimpleNamespace(add=told_of("saved"), steps=1, taken=lambda state: 0)
    random = Randomness(8)
    monkeypatch.setattr(random, "advance", told_of("advance"))
    plan = mm.Plan.of(lines((ONE, 4)), population=25)
    start = torch.tensor([0.5], dtype=torch.float64)
    inner = PrivateStep(plan, Rule(rule, "paper", momentum=0.5), 2.0, State.start(start), random, account)
    run = PrivateLoop.__new__(PrivateLoop)
    vars(run).update(
        total=torch.tensor([4.0], dtype=torch.float64), added=3, tau=None, step=inner, model=layer, account=account,
        require_own_weights=told_of_changed(changed), wrote=lambda: seen.update(wrote=list(told)),
        flat=SimpleNamespace(write=told_of("write"), size=1, views=lambda v: {"weight": v.reshape(1, 1)}),
    )  # fmt: skip
    group = {"lr": 0.25} | ({} if decay is None else {"weight_decay": decay})
    optimizer = SimpleNamespace(_loop=run, param_groups=[group], _original=SimpleNamespace(step=told_of("original")))
    try:
        PrivateOptimizer._complete(optimizer)
    except mm.ModelMixError:
        assert fails or changed
    return run, told, seen, inner


@pytest.mark.parametrize("decay", [None, 0.7])
def test_a_loop_takes_the_trainers_step(monkeypatch, decay):
    run, told, seen, inner = completed(monkeypatch, decay=decay)
    assert told == ["saved", "advance", "write"]
    rule = Rule("mix", "paper", 0.5, decay or 0.0)
    start = State.start(torch.tensor([0.5], dtype=torch.float64))
    wanted = step.propose_step(
        start, torch.tensor([4.0], dtype=torch.float64), Randomness(8).step(), rule=rule, mechanism=ONE, clip=2.0,
        eta=0.25, expected_batch=5.0,
    ).accepted()  # fmt: skip
    assert torch.equal(inner.state.last, wanted.last)
    assert torch.equal(inner.state.velocity, wanted.velocity)
    assert seen["write"][0][0] is inner.state.last
    assert seen["saved"][0] == (1, ONE)
    assert run.total.tolist() == [0.0]
    assert run.added == 0
    assert seen["wrote"] == told


def test_without_mixing_the_optimizer_is_given_the_noisy_mean(monkeypatch):
    run, told, seen, inner = completed(monkeypatch, rule="plain")
    assert seen["wrote"] == told
    assert told == ["saved", "advance", "original"]
    noise = Randomness(8).step().gaussian("noise", 1).item()
    assert run.model.weight.grad.item() == pytest.approx(4.0 / 5.0 + 2.0 / 5.0 * noise, rel=1e-14)
    assert run.model.bias.grad is None
    assert run.total.tolist() == [0.0]
    assert run.added == 0
    assert inner.state.step == 1


@pytest.mark.parametrize("fails", ["saved", "advance", "write"])
def test_the_line_comes_first_and_a_sum_is_used_once(monkeypatch, fails):
    run, told, _, inner = completed(monkeypatch, fails=fails)
    order = ["saved", "advance", "write"]
    assert told == order[: order.index(fails) + 1]
    assert run.total.tolist() == [0.0]
    assert run.added == 0
    assert (inner.state.last.item() == 0.5) == (fails != "write")
    assert inner.state.step == 1  # the line counts


@pytest.mark.parametrize("rule", ["mix", "plain"])
def test_weights_changed_from_outside_end_the_step_before_its_line(monkeypatch, rule):
    _, told, _, _ = completed(monkeypatch, rule=rule, changed=True)
    assert not told
