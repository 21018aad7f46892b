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
from modelmix.training.mixing import midpoint, padded_gap
from modelmix.training.rules import Rule, State, noise, take_step

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


def test_released_momentum_is_the_raw_one_and_norm_layers_are_not_mixed():
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)).double()
    mechanism = mm.Mechanism(1e-3, 1.0, 2.0)
    trainer = Trainer(
        model, half_square, (X, torch.zeros(2)), mechanism, clip=1.0, lr=0.2, rule="released", momentum=0.9, seed=4
    )
    before = trainer.state
    trainer.run(1, progress=False)
    moved = (trainer.state.last - before.last).abs()
    raw = trainer.state.velocity
    torch.testing.assert_close(trainer.state.last[:6], before.last[:6] - 0.2 * raw[:6])  # the norm layer
    assert float((moved[6:] - 0.2 * raw[6:].abs()).abs().min()) > 1e-4  # the rest is mixed
    with pytest.raises(mm.UnprovedError, match="momentum carries unmixed"):
        trainer.epsilon()


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
        ({"multiplicity": 2}, "needs augment"),
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
