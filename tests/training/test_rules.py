"""Algorithm 1 and its relatives, against transcriptions that go coordinate by coordinate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned import Trainer
from torch import nn

import modelmix as mm
from modelmix.training import Randomness, Schedule
from modelmix.training.rules import Rule, State, midpoint, padded_gap
from modelmix.training.schedules import schedule
from modelmix.training.step import noise, propose_step


def take_step(*arguments, **how):
    return propose_step(*arguments, **how).accepted()


D = 12
vectors = st.lists(st.floats(-3, 3), min_size=D, max_size=D).map(lambda v: torch.tensor(v, dtype=torch.float64))


def algorithm_1(last, previous, total, alpha, delta, eta, tau, batch, padding):
    """Lines 4 to 11 as they are printed, with sign(0) = 1; "exact" widens to tau instead."""
    out = []
    for j in range(len(last)):
        a, b = float(last[j]), float(previous[j])
        if abs(a - b) < tau:
            sign = 1 if a >= b else -1
            if padding == "paper":
                a, b = a + sign * tau / 2, b - sign * tau / 2
            else:
                a, b = (a + b) / 2 + sign * tau / 2, (a + b) / 2 - sign * tau / 2
        out.append(alpha[j] * a + (1 - alpha[j]) * b - eta * (total[j] / batch + delta[j]))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sum_that_is_no_number_makes_no_step(value):
    """Clipping says so when a sum exceeded its bounds: this is where such a sum ends."""
    zero = torch.zeros(D, dtype=torch.float64)
    total = zero.clone()
    total[3] = value
    how = {"mechanism": mm.Mechanism(0.7, 0.1, 3.0), "clip": 2.0, "eta": 0.3, "expected_batch": 5.0}
    with pytest.raises(mm.ModelMixError, match="sum of clipped gradients or the new state is not finite"):
        take_step(State(zero, zero, zero), total, Randomness(9).step(), rule=Rule("mix"), **how)


@pytest.mark.parametrize("name", ["plain", "average"])
def test_no_step_is_taken_whose_account_counts_on_a_mixing_that_did_not_happen(name):
    zero = torch.zeros(D, dtype=torch.float64)
    how = {"mechanism": mm.Mechanism(0.7, 0.1, 3.0), "clip": 2.0, "eta": 0.3, "expected_batch": 5.0}
    with pytest.raises(mm.UnprovedError, match="every trained coordinate is mixed"):
        take_step(State(zero, zero, zero), zero, Randomness(9).step(), rule=Rule(name), **how)


@pytest.mark.parametrize("padding", ["exact", "paper"])
@pytest.mark.parametrize("name", ["mix", "alternate"])
@given(last=vectors, previous=vectors, total=vectors, equal=st.booleans())
def test_a_step_is_algorithm_1(name, padding, last, previous, total, equal):
    previous = last if equal else previous
    mechanism, clip, eta, batch = mm.Mechanism(0.7, 0.1, 3.0), 2.0, 0.3, 5.0
    state = State(last, previous, torch.zeros(D, dtype=torch.float64))
    draw = Randomness(9).step()
    new = take_step(
        state, total, draw, rule=Rule(name, padding), mechanism=mechanism, clip=clip, eta=eta, expected_batch=batch
    )
    again = Randomness(9).step()
    delta = clip / batch * noise(mechanism, again, D)
    alpha = again.uniform("mixing", D)
    tau = 3.0 * clip / batch * eta
    wanted = algorithm_1(last, previous, total, alpha, delta, eta, tau, batch, padding)
    torch.testing.assert_close(new.last, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(new.previous, last)


@given(last=vectors, previous=vectors, tau=st.floats(1e-3, 5))
def test_padding_widens_small_gaps_about_the_midpoint(last, previous, tau):
    gap = last - previous
    for padding in ("exact", "paper"):
        padded = padded_gap(last, previous, tau, padding)
        assert bool((padded.abs() >= tau * (1 - 1e-12)).all())
        assert torch.equal(padded[gap.abs() >= tau], gap[gap.abs() >= tau])
        small = gap.abs() < tau
        wanted = torch.full_like(gap, tau) if padding == "exact" else gap.abs() + tau
        torch.testing.assert_close(padded.abs()[small], wanted[small])
        assert bool((torch.sign(padded) == torch.where(gap >= 0, 1.0, -1.0)).all())
    torch.testing.assert_close(midpoint(last, previous), (last + previous) / 2)


def test_two_equal_states_are_mixed_as_well():
    w = torch.zeros(4, dtype=torch.float64)
    assert padded_gap(w, w, 0.5, "exact").tolist() == [0.5] * 4
    assert padded_gap(w, -0.0 * w, 0.5, "paper").tolist() == [0.5] * 4


class Bowl(nn.Module):
    """The gradient of a sample is w - x."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), start, dtype=torch.float64))

    def forward(self, x):
        return self.w - x


def half_square(outputs, targets):
    return 0.5 * outputs.square().sum()


X = torch.tensor([[0.5, -1.0, 2.0], [0.0, 1.0, -1.0]], dtype=torch.float64)


def small(mechanism, lr=0.2, **options):
    return Trainer(Bowl(), half_square, (X, torch.zeros(2)), mechanism, clip=100.0, lr=lr, seed=4, **options)


def test_the_alternating_scheme_trains_two_models_in_turns():
    """Equations 3 and 4 with two explicit models: each mixes with the other and takes the gradient at itself."""
    mechanism, eta, clip, batch, steps = mm.Mechanism(0.01, 1.0, 0.02), 0.2, 100.0, 2.0, 7
    other = Bowl(-1.0)
    trainer = small(mechanism, rule="alternate", previous=other)
    trainer.run(steps, progress=False)
    # The first model to be updated is the older state.
    models = [torch.full((3,), -1.0, dtype=torch.float64), torch.full((3,), 1.0, dtype=torch.float64)]
    tau = 0.02 * clip / batch * eta
    for k, draw in zip(range(steps), Randomness(4).coming_steps(), strict=False):
        mine, partner = models[k % 2], models[1 - k % 2]
        gradient = (mine[None] - X).sum(0) / batch
        delta = clip / batch * noise(mechanism, draw, 3)
        alpha = draw.uniform("mixing", 3)
        gap = partner - mine
        wide = torch.where(gap.abs() < tau, torch.where(gap >= 0, tau, -tau), gap)
        models[k % 2] = (mine + partner) / 2 + (alpha - 0.5) * wide - eta * (gradient + delta)
    torch.testing.assert_close(trainer.state.last, models[(steps - 1) % 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trainer.state.previous, models[steps % 2], rtol=1e-5, atol=1e-5)


def test_the_first_states_are_those_given():
    mechanism = mm.Mechanism(1.0, 1.0, 1.0)
    assert torch.equal(small(mechanism).state.previous, small(mechanism).state.last)
    other = Bowl(-1.0)
    for previous in (other, other.state_dict()):
        state = small(mechanism, previous=previous).state
        assert state.last.tolist() == [1.0] * 3
        assert state.previous.tolist() == [-1.0] * 3
    with pytest.raises(mm.ModelMixError, match="no w of shape"):
        small(mechanism, previous=nn.Linear(2, 2))


def test_momentum_without_mixing_is_the_usual_one():
    """Released gradients are the noisy gradients then, so the two momenta are one."""
    mechanism, steps = mm.Mechanism(0.05, 1.0), 9
    trainer = small(mechanism, rule="plain", momentum=0.8, weight_decay=0.1)
    trainer.run(steps, progress=False)
    w = torch.full((3,), 1.0, dtype=torch.float64)
    velocity = torch.zeros(3, dtype=torch.float64)
    for _, draw in zip(range(steps), Randomness(4).coming_steps(), strict=False):
        gradient = (w[None] - X).sum(0) / 2 + 50.0 * noise(mechanism, draw, 3)
        velocity = 0.8 * velocity + gradient
        w = w - 0.2 * (velocity + 0.1 * w)
    torch.testing.assert_close(trainer.state.last, w, rtol=1e-5, atol=1e-5)


def test_momentum_with_mixing_uses_released_states_only():
    """The whole run can be replayed from its released states, its clipped sums and fresh noise."""
    trainer = small(mm.Mechanism(0.05, 1.0, 0.1), momentum=0.7)
    states = [trainer.state.previous, trainer.state.last]
    velocity = torch.zeros(3, dtype=torch.float64)
    for _ in range(8):
        trainer.run(1, progress=False)
        centre = (states[-1] + states[-2]) / 2 - 0.2 * 0.7 * velocity
        velocity = 0.7 * velocity + (centre - trainer.state.last) / 0.2
        states.append(trainer.state.last)
        torch.testing.assert_close(trainer.state.velocity, velocity)


def test_the_average_of_the_last_two_states_without_mixing():
    trainer = small(mm.Mechanism(1e-6, 1.0), rule="average")
    w = [torch.full((3,), 1.0, dtype=torch.float64)] * 2
    for _ in range(6):
        trainer.run(1, progress=False)
        w.append((w[-1] + w[-2]) / 2 - 0.2 * (w[-1][None] - X).sum(0) / 2)
        torch.testing.assert_close(trainer.state.last, w[-1], rtol=1e-3, atol=1e-3)


def test_the_average_of_released_states():
    trainer = small(mm.Mechanism(0.05, 1.0, 0.1), ema=0.9)
    average = trainer.state.last
    for k in range(1, 30):
        trainer.run(1, progress=False)
        decay = min(0.9, (1 + k) / (10 + k))
        average = decay * average + (1 - decay) * trainer.state.last
    torch.testing.assert_close(trainer.state.average, average)
    torch.testing.assert_close(trainer.averaged_state_dict()["w"], average)


def test_tau_follows_the_learning_rate():
    """omega is the mechanism's; tau = omega * c * eta / B."""
    lr = Schedule.pieces({1: 0.4, 3: 0.1})
    trainer = small(mm.Mechanism(1e-9, 1.0, 0.5), lr=lr)
    for eta in (0.4, 0.4, 0.1, 0.1):
        before = trainer.state
        trainer.run(1, progress=False)
        tau = 0.5 * 100.0 * eta / 2
        gap = padded_gap(before.last, before.previous, tau, "exact").abs()
        gradient = (before.last[None] - X).sum(0) / 2
        off = trainer.state.last - midpoint(before.last, before.previous) + eta * gradient
        assert bool((off.abs() <= gap / 2 * (1 + 1e-4)).all())
        assert float(gap.min()) >= tau * (1 - 1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "stir"}, "choose one of mix, alternate"),
        ({"padding": "thick"}, "choose one of exact, paper"),
        ({"momentum": 1.0}, "below 1"),
        ({"ema": -0.1}, "at least 0"),
        ({"weight_decay": -1.0}, "weight decay"),
        ({"multiplicity": 2}, "needs a function"),
        ({"nonfinite": "hope"}, "choose stop or drop"),
        ({"lr": 0.0}, "learning rate"),
        ({"tau": -1.0}, "mixing threshold"),
    ],
)
def test_nonsense_is_refused_in_one_line(options, message):
    with pytest.raises(mm.ModelMixError, match=message) as caught:
        small(mm.Mechanism(1.0, 1.0, 1.0), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Schedule.pieces({1: 2.0, 4: 1.0}), [2, 2, 2, 1, 1]),
        (Schedule.linear(2.0, 1.0, 5), [2, 1.75, 1.5, 1.25, 1]),
        (Schedule.cosine(2.0, 1.0, 5), [2, 1.8535534, 1.5, 1.1464466, 1]),
        (Schedule.linear(2.0, 1.0, 2), [2, 1, 1, 1, 1]),
    ],
)
def test_schedules(schedule, values):
    assert [schedule.at(k) for k in range(1, 6)] == pytest.approx(values)


@pytest.mark.parametrize("points", [{}, {2: 1.0}, {1: 0.0}, {1: float("nan")}, {1.5: 1.0}])
def test_bad_schedules_are_refused(points):
    with pytest.raises(mm.ModelMixError):
        Schedule.pieces(points)


# A step without a trainer: every coordinate, every rule, every law, against plain Python.

HOW = {"clip": 2.0, "eta": 0.3, "expected_batch": 5.0}
UNIT, ETA = 0.4, 0.3  # clip / expected batch
TAU = 1.5 * UNIT * ETA
LAST = [0.5, 0.5, -1.0, 2.0, 0.1]
PREVIOUS = [0.5, 0.45, 1.0, 1.9, 0.15]  # equal, near from above, wide from below, near, near from below
VELOCITY = [1.0, -2.0, 0.5, 3.0, -0.25]
AVERAGE = [0.0, 1.0, -1.0, 4.0, 0.5]
TOTAL = [1.0, -3.0, 0.0, 2.0, -0.5]


def vector(values):
    return torch.tensor(values, dtype=torch.float64)


def start(step=0, average=True, previous=PREVIOUS):
    return State(vector(LAST), vector(previous), vector(VELOCITY), vector(AVERAGE) if average else None, step)


def expected_step(rule, law, step, *, noises, alphas, mixed=True):
    """(state, velocity, average) of the next step in plain Python, coordinate by coordinate."""
    states, velocities, averages = [], [], []
    decay = None if rule.ema is None else min(rule.ema, (step + 2) / (step + 11))
    for j in range(len(LAST)):
        last, previous, velocity = LAST[j], PREVIOUS[j], VELOCITY[j]
        centre = last if rule.name == "plain" else (last + previous) / 2
        gap = last - previous
        if abs(gap) < TAU:
            sign = 1 if gap >= 0 else -1
            gap = sign * TAU if rule.padding == "exact" else gap + sign * TAU
        if rule.name in ("plain", "average"):
            gap = 0.0
        centre = centre - ETA * rule.weight_decay * last - ETA * rule.momentum * velocity
        noisy = TOTAL[j] / 5.0 + UNIT * noises[j]
        new = centre - ETA * noisy + (alphas[j] - 0.5) * gap
        released = (centre - new) / ETA
        states.append(new)
        velocities.append(rule.momentum * velocity + released if rule.momentum else velocity)
        averages.append(AVERAGE[j] if decay is None else decay * AVERAGE[j] + (1 - decay) * new)
    return states, velocities, averages


RULES_TRIED = [
    *(Rule(name, padding) for name in ("mix", "alternate") for padding in ("exact", "paper")),
    Rule("mix", weight_decay=0.7),
    Rule("mix", momentum=0.6),
    Rule("alternate", momentum=0.6, weight_decay=0.7, ema=0.95),
    Rule("plain"),
    Rule("plain", momentum=0.6, weight_decay=0.7, ema=0.05),
    Rule("average", momentum=0.6),
    Rule("average", weight_decay=0.7, ema=0.0),
]


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize(
    "rule", RULES_TRIED, ids=lambda r: f"{r.name}-{r.padding}-{r.momentum}-{r.weight_decay}-{r.ema}"
)
def test_a_step_coordinate_by_coordinate(rule, law):
    mixing = 0.0 if rule.name in ("plain", "average") else 1.5
    options = {"p": 4} if law == "laplace" else {}
    mechanism = mm.Mechanism(0.7, 0.1, mixing, law=law, **options)
    again = Randomness(9).step()
    noises = (0.7 * getattr(again, law)("noise", 5)).tolist()
    alphas = again.uniform("mixing", 5).tolist()
    for step in (0, 1, 200):  # the warm-up of the average, and what comes after it
        new = take_step(start(step), vector(TOTAL), Randomness(9).step(), rule=rule, mechanism=mechanism, **HOW)
        states, velocities, averages = expected_step(rule, law, step, noises=noises, alphas=alphas)
        torch.testing.assert_close(new.last, vector(states), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(new.velocity, vector(velocities), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(new.average, vector(averages), rtol=1e-13, atol=1e-13)
        assert new.previous.tolist() == LAST
        assert new.step == step + 1


def test_a_step_does_not_write_to_the_state_it_starts_from():
    """A refused step leaves the run where it was."""
    state = start()
    for rule in RULES_TRIED:
        propose_step(state, vector(TOTAL), Randomness(9).step(), rule=rule, mechanism=mm.Mechanism(0.7, 0.1), **HOW)
    kept = start()
    for name in ("last", "previous", "velocity", "average"):
        assert torch.equal(getattr(state, name), getattr(kept, name)), name


def test_a_state_without_an_average_gets_none():
    for ema in (None, 0.9):
        rule = Rule("mix", ema=ema)
        how = {"rule": rule, "mechanism": mm.Mechanism(0.7, 0.1, 1.5), **HOW}
        assert take_step(start(average=False), vector(TOTAL), Randomness(9).step(), **how).average is None
    kept = take_step(start(), vector(TOTAL), Randomness(9).step(), **{**how, "rule": Rule("mix")}).average
    assert kept.tolist() == AVERAGE


def test_a_step_counts_from_zero_and_has_no_average_unless_asked():
    zero = torch.zeros(2, dtype=torch.float64)
    assert State(zero, zero, zero).step == 0
    assert State(zero, zero, zero).average is None


@pytest.mark.parametrize("name", ["mix", "alternate", "average", "plain"])
def test_the_point_of_the_gradient(name):
    """Equation 3 takes it at the older state; everything else at the newer one."""
    state = start()
    wanted = state.previous if name == "alternate" else state.last
    assert Rule(name).gradient_point(state) is wanted


@pytest.mark.parametrize("name", ["mix", "alternate", "average", "plain"])
def test_a_rule_that_does_not_mix_is_refused_where_mixing_is_counted_on(name):
    Rule(name).check(mm.Mechanism(0.7, 0.1))
    if name in ("average", "plain"):
        with pytest.raises(mm.UnprovedError, match="does not mix"):
            Rule(name).check(mm.Mechanism(0.7, 0.1, 1e-9))
    else:
        Rule(name).check(mm.Mechanism(0.7, 0.1, 1e-9))


def test_a_rule_has_nothing_that_was_not_asked_for():
    wanted = Rule("mix", "exact", momentum=0.0, weight_decay=0.0, ema=None, tau=None, previous=None)
    assert Rule("mix") == wanted


def test_no_rule_of_ours_breaks_the_proof():
    assert not any(Rule(name).unproved for name in Rule.NAMES)


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"ema": 1.0}, {"momentum": -1e-9}, {"ema": -1e-9}])
def test_factors_below_zero_and_from_one_are_refused(options):
    with pytest.raises(mm.ModelMixError, match="at least 0 and below 1"):
        Rule("mix", **options)
    assert Rule("mix", momentum=0.0, ema=0.0).ema == 0.0


def test_a_law_of_ones_own_is_not_trained_with():
    class Own:
        law, noise_multiplier = object(), 1.0

    with pytest.raises(mm.ModelMixError, match="use gaussian or laplace"):
        noise(Own(), Randomness(9).step(), 3)


@pytest.mark.parametrize("eta", [0.0, -0.1, float("nan"), float("inf")])
def test_a_learning_rate_that_makes_no_step_is_refused(eta):
    how = {**HOW, "eta": eta, "rule": Rule("plain"), "mechanism": mm.Mechanism(0.7, 0.1)}
    with pytest.raises(mm.ModelMixError, match="makes no step"):
        propose_step(start(), vector(TOTAL), Randomness(9).step(), **how)


class Narrow(Rule):
    """Mixes one coordinate over less than it should."""

    def propose(self, state, eta, tau):
        centre, gap = super().propose(state, eta, tau)
        if gap is not None:
            gap[FAULT[0]] = FAULT[1] * tau
        return centre, gap


FAULT = [0, 0.999]


@pytest.mark.parametrize("factor", [0.999, -0.999, 0.0, 1 - 1e-9, float("nan")])
@pytest.mark.parametrize("coordinate", range(5))
def test_one_coordinate_that_is_not_mixed_ends_the_step(coordinate, factor):
    FAULT[:] = coordinate, factor
    how = {**HOW, "mechanism": mm.Mechanism(0.7, 0.1, 1.5)}
    proposed = propose_step(start(), vector(TOTAL), Randomness(9).step(), rule=Narrow("mix"), **how)
    assert not bool(proposed.mixed)
    if factor == factor:  # a gap that is no number makes a state that is none, which is said first
        with pytest.raises(mm.UnprovedError, match="mixed over less than tau"):
            proposed.accepted()
    FAULT[1] = -1.0
    assert bool(propose_step(start(), vector(TOTAL), Randomness(9).step(), rule=Narrow("mix"), **how).mixed)


class Unproved(Narrow):
    unproved = ("something is not covered",)


def test_what_does_not_count_on_mixing_is_not_asked_for_it():
    FAULT[:] = 0, 0.5
    for rule, mixing in ((Narrow("mix"), 0.0), (Unproved("mix"), 1.5), (Rule("plain"), 0.0)):
        how = {"rule": rule, "mechanism": mm.Mechanism(0.7, 0.1, mixing), **HOW}
        proposed = propose_step(start(), vector(TOTAL), Randomness(9).step(), **how)
        assert proposed.mixed is None
        assert torch.equal(proposed.accepted().last, proposed.state.last)


def test_a_width_that_is_no_longer_a_number_above_zero_mixes_nothing():
    how = {"rule": Rule("mix"), "mechanism": mm.Mechanism(0.7, 0.1, 1.5), "clip": 1e-100, "expected_batch": 5.0}
    with pytest.raises(mm.UnprovedError, match="mixed over less than tau"):
        take_step(start(previous=LAST), vector([0.0] * 5), Randomness(9).step(), eta=1e-300, **how)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["last", "previous", "total"])
@pytest.mark.parametrize("coordinate", range(5))
def test_one_coordinate_that_is_no_number_ends_the_step(coordinate, which, value):
    """Of the sum, or of the new state alone; the other one being in order does not help."""
    state, total = start(), vector(TOTAL)
    (total if which == "total" else getattr(state, which))[coordinate] = value
    rule = Rule("average" if which == "previous" else "plain")
    how = {"rule": rule, "mechanism": mm.Mechanism(0.7, 0.1), **HOW}
    proposed = propose_step(state, total, Randomness(9).step(), **how)
    assert not bool(proposed.finite)
    with pytest.raises(mm.ModelMixError, match="not finite: no step was taken"):
        proposed.accepted()


def test_a_step_that_leaves_the_numbers_is_refused():
    """Sum and noise are finite; the state is not, because of the learning rate."""
    how = {"rule": Rule("plain"), "mechanism": mm.Mechanism(0.7, 0.1), "clip": 2.0, "expected_batch": 1.0}
    proposed = propose_step(start(), vector([1e300] * 5), Randomness(9).step(), eta=1e200, **how)
    assert not bool(proposed.finite)


@pytest.mark.parametrize("padding", ["exact", "paper"])
def test_gaps_at_the_threshold_are_kept(padding):
    last, previous = vector([2.0, 1.0, 1.0, 1.0, 1.5]), vector([1.0, 2.0, 1.0, 1.5, 1.0])
    wanted = {"exact": [1.0, -1.0, 1.0, -1.0, 1.0], "paper": [1.0, -1.0, 1.0, -1.5, 1.5]}
    assert padded_gap(last, previous, 1.0, padding).tolist() == wanted[padding]
    assert padded_gap(last, previous, 0.0, padding).tolist() == [1.0, -1.0, 0.0, -0.5, 0.5]
    assert midpoint(last, previous).tolist() == [1.5, 1.5, 1.0, 1.25, 1.25]


@pytest.mark.parametrize("tau", [-1e-9, float("nan")])
def test_a_threshold_below_zero_is_refused(tau):
    with pytest.raises(mm.ModelMixError, match="widens nothing"):
        padded_gap(vector(LAST), vector(PREVIOUS), tau, "exact")


def test_an_unknown_padding_is_refused():
    with pytest.raises(mm.ModelMixError, match="padding = 'thick' is unknown"):
        padded_gap(vector(LAST), vector(PREVIOUS), 1.0, "thick")
    with pytest.raises(mm.ModelMixError, match="padding = 'thick' is unknown"):
        Rule("mix", "thick")
    with pytest.raises(mm.ModelMixError, match="rule = 'stir' is unknown"):
        Rule("stir")
    with pytest.raises(mm.ModelMixError, match="weight decay"):
        Rule("mix", weight_decay=-1e-9)


def test_a_schedule_is_sorted_and_names_its_shape():
    assert Schedule("pieces", ((4, 1.0), (1, 2.0))).points == ((1, 2.0), (4, 1.0))
    assert [Schedule.pieces({4: 1.0, 1: 2.0}).at(k) for k in (1, 3, 4)] == [2.0, 2.0, 1.0]
    with pytest.raises(mm.ModelMixError, match="choose one of pieces, linear, cosine"):
        Schedule("sine", ((1, 1.0),))
    for steps in (0, -1):
        for make in (Schedule.linear, Schedule.cosine):
            with pytest.raises(mm.ModelMixError, match="the length"):
                make(1.0, 2.0, steps)
    with pytest.raises(mm.ModelMixError, match="names every step once"):
        Schedule("pieces", ((1, 1.0), (1, 2.0)))


@pytest.mark.parametrize("make", [Schedule.linear, Schedule.cosine])
def test_the_shortest_schedules(make):
    """One step, and two: the start at step 1, the end from step 2 on."""
    for steps in (1, 2):
        assert make(3.0, 1.0, steps).points == ((1, 3.0), (2, 1.0))
        assert [make(3.0, 1.0, steps).at(k) for k in (1, 2, 3)] == pytest.approx([3.0, 1.0, 1.0])
    assert make(3.0, 1.0, 9).points == ((1, 3.0), (9, 1.0))
    assert make(3.0, 1.0, 3).as_dict() == {"schedule": make.__name__, "points": [[1, 3.0], [3, 1.0]]}


def test_a_schedule_from_a_schedule_or_a_number():
    own = Schedule.linear(2.0, 1.0, 5)
    assert schedule("lr", own, "the learning rate") is own
    assert schedule("lr", 0.25, "the learning rate") == Schedule.pieces({1: 0.25})
    with pytest.raises(mm.ModelMixError, match="lr = 0"):
        schedule("lr", 0.0, "the learning rate")
