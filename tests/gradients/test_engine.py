"""The engine of a run: precision, compiling, and what it says."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from planned import Trainer
from torch import nn

from modelmix import Embedding, EmbeddingMechanism, Mechanism, Performance
from modelmix.errors import ModelMixError
from modelmix.gradients import Batch, Engine, compiled, layers
from modelmix.gradients.clip import Clip
from modelmix.gradients.parameters import FlatParameters
from modelmix.models.networks import Pixels, cnn
from modelmix.models.residual import StandardisedConv2d
from modelmix.training.embedding import columns


@pytest.fixture
def fast_compiler(monkeypatch):
    """All of tracing, and no code generation."""
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.block(self.words(x)).mean(1))


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 10))
        self[1].requires_grad_(False)


def images() -> nn.Module:
    return nn.Sequential(
        StandardisedConv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, 2),
        nn.Flatten(),
        nn.Linear(4, 10),
    )


CASES = {
    "images": (images, lambda m: torch.randn(m, 3, 4, 4)),
    "frozen layers": (Frozen, lambda m: torch.randn(m, 3, 4, 4)),
    "words": (Words, lambda m: torch.randint(0, 20, (m, 7))),
    "pixels": (lambda: Pixels(cnn(1, 14, 10)), lambda m: torch.randint(0, 256, (m, 1, 14, 14), dtype=torch.uint8)),
}


def case(name, m=6):
    torch.manual_seed(0)
    make, inputs = CASES[name]
    return make(), inputs(m), torch.randint(0, 10, (m,))


def views(model, factor=1.0):
    flat = FlatParameters(model)
    return flat.views(factor * flat.read())


def whole(gradients):
    return columns(gradients, slice(0, sum(p.numel() for p in gradients.parameters.values())))


def sums(engine, model, x, y, clip, factor=1.0):
    weights = torch.ones(len(y), dtype=torch.float64)
    weights[-1] = 0
    return engine(views(model, factor), Batch(x, y, weights), clip)


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_and_not_compiled_agree(fast_compiler, name, precision):
    model, x, y = case(name)
    one, other = (Engine(model, F.cross_entropy, (x, y), precision=precision, compiled=way) for way in (True, False))
    for clip, factor in ((Clip(0.1, 100), 1.0), (Clip(0.1, 100), 1.1), (Clip(2.0, 100), 1.1), (Clip(0.1), 1.0)):
        mine, right = (sums(engine, model, x, y, clip, factor) for engine in (one, other))
        torch.testing.assert_close(mine.total, right.total, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(mine.norms, right.norms, rtol=1e-6, atol=0)
        assert mine.norms.numel() == 5
    for factor in (1.0, 1.1):
        mine, right = (whole(engine.gradients(views(model, factor), Batch(x, y))) for engine in (one, other))
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-7)
    assert one._compile
    assert len(one._compiled) == 2  # with and without truncation; other weights and clips need no other trace
    assert len(one._seen) == 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
def test_gradients_are_those_of_every_sample_for_any_part_of_the_vector(name, engine):
    """Against one sample at a time, wherever the part is cut and however many rows a sample has."""
    model, x, y = case(name)
    chosen = Engine(model, F.cross_entropy, (x, y), name=engine)
    found, each = chosen.gradients(views(model), Batch(x, y)), []
    for a, b in zip(x, y, strict=True):
        loss = F.cross_entropy(model(a[None]), b[None])
        trained = [p for p in model.parameters() if p.requires_grad]
        each.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]))
    right = torch.stack(each).double()
    d = right.shape[1]
    for part in (slice(0, d), slice(0, d // 3), slice(d // 3, 2 * d // 3 + 1), slice(d - 5, d)):
        for _ in range(2):  # as often as one likes
            torch.testing.assert_close(columns(found, part), right[:, part], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(columns(found.first(4), slice(3, d)), right[:4, 3:], rtol=1e-4, atol=1e-6)
    two = chosen.gradients(views(model), Batch(x, y, rows_per_sample=2))
    torch.testing.assert_close(whole(two), right.reshape(3, 2, d).mean(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
def test_every_part_sees_the_same_dropout_and_every_chunk_another(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    chosen = Engine(model, F.cross_entropy, (x, y), name=engine)
    one, other = (chosen.gradients(views(model), Batch(x, y)) for _ in range(2))
    (first, dropped), (first_again, dropped_again) = (
        (columns(g, slice(0, 140)), columns(g, slice(140, 203))) for g in (one, other)
    )
    torch.testing.assert_close(
        columns(one, slice(100, 203)), torch.cat([first[:, 100:], dropped], 1), rtol=1e-6, atol=1e-8
    )
    # What is dropped has no gradient in either layer.
    gone = dropped[:, :60].reshape(8, 3, 20).abs().sum(1) == 0
    assert gone.any()
    assert not first[:, 120:][gone].any()
    assert not torch.equal(dropped, dropped_again)
    assert not torch.equal(first, first_again)


class Clamping(nn.Linear):
    """Writes to its weight while it runs."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Spare(nn.Module):
    """A layer that is not used lies between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(6, 5), nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Scaling(Spare):
    """Writes to its input."""

    def forward(self, x):
        return super().forward(x.mul_(0.5))


def some(n=8):
    torch.manual_seed(0)
    return torch.randn(n, 6), torch.randint(3, (n,))


@pytest.mark.parametrize("way", ["hooks", "vmap", "loop", "compiled"])
def test_a_model_may_not_write_to_what_is_trained(fast_compiler, way):
    """Also where random draws keep a compiled one from being compared."""
    x, y = some()
    model = nn.Sequential(Clamping(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    name = "auto" if way == "compiled" else way
    with pytest.raises(ModelMixError, match=r"changes its trained parameters|writes to its .* parameters"):
        whole(
            Engine(model, F.cross_entropy, (x, y), name=name, compiled=way == "compiled").gradients(
                views(model), Batch(x, y)
            )
        )


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
def test_parameters_that_are_not_used_have_no_gradient(engine):
    x, y = some()
    model = Spare()
    found = Engine(model, F.cross_entropy, (x, y), name=engine).gradients(views(model), Batch(x, y))
    spare = slice(35, 50)
    assert not columns(found, spare).any()
    assert not columns(found, slice(30, 60))[:, 5:20].any()
    assert columns(found, slice(0, 35)).any(1).all()
    assert columns(found, slice(50, 68)).any(1).all()


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_every_pass_is_given_the_same_inputs(engine):
    """Whatever the model does to them."""
    x, y = some()
    model = Scaling()
    found = Engine(model, F.cross_entropy, (x.clone(), y), name=engine).gradients(views(model), Batch(x.clone(), y))
    first, again = whole(found), whole(found)
    assert torch.equal(first, again)
    plain = Spare()
    plain.load_state_dict(model.state_dict())
    right = whole(Engine(plain, F.cross_entropy, (x, y)).gradients(views(plain), Batch(0.5 * x, y)))
    torch.testing.assert_close(first, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_passes_leave_torchs_generator_alone(engine):
    x, y = some()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    found = Engine(model, F.cross_entropy, (x, y), name=engine).gradients(views(model), Batch(x, y))
    before = torch.get_rng_state()
    whole(found)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
def test_no_samples_have_no_gradients(engine):
    x, y = some()
    model = Spare()
    found = Engine(model, F.cross_entropy, (x, y), name=engine).gradients(views(model), Batch(x[:0], y[:0]))
    assert whole(found).shape == (0, 68)


@pytest.mark.parametrize("batch", [lambda x, y: Batch(x[:0], y[:0]), lambda x, y: Batch(x, y, rows_per_sample=2)])
def test_outputs_are_refused_for_no_samples_and_for_samples_of_several_rows(batch):
    x, y = some()
    model = Spare()
    engine = Engine(model, F.cross_entropy, (x, y), name="vmap")
    with pytest.raises(ModelMixError, match="one row each"):
        engine.with_outputs(views(model), batch(x, y), Clip(1.0))


def test_layers_of_other_groups_are_not_written_down(monkeypatch):
    x, y = some()
    model, written, right = Spare(), [], layers.LayerCall.gradients
    found = Engine(model, F.cross_entropy, (x, y), name="hooks").gradients(views(model), Batch(x, y))
    monkeypatch.setattr(
        layers.LayerCall,
        "gradients",
        lambda call, values: (written.append(set(call.names.values())), right(call, values))[1],
    )
    columns(found, slice(0, 30))
    assert written == [{"first.weight", "first.bias"}]


def test_a_compiled_pass_is_for_one_mode_and_one_number_of_copies(fast_compiler):
    x, y = some()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    engine = Engine(model, F.cross_entropy, (x, y), compiled=True)
    parameters = views(model)
    assert not torch.equal(*(whole(engine.gradients(parameters, Batch(x, y))) for _ in range(2)))
    model.eval()
    assert torch.equal(*(whole(engine.gradients(parameters, Batch(x, y))) for _ in range(2)))
    assert [engine.gradients(parameters, Batch(x, y, rows_per_sample=copies)).samples for copies in (1, 2, 4)] == [
        8,
        4,
        2,
    ]


def test_a_form_that_cannot_be_compiled_does_not_keep_others_from_it(fast_compiler, monkeypatch):
    x, y = some()
    model, right = Spare(), compiled.require_equal
    engine = Engine(model, F.cross_entropy, (x, y), compiled=True)

    def unfit(*sums):
        raise compiled.CompilationRejected("off")

    monkeypatch.setattr(compiled, "require_equal", unfit)
    with pytest.warns(UserWarning, match="uncompiled"):
        plain = whole(engine.gradients(views(model), Batch(x, y)))
    monkeypatch.setattr(compiled, "require_equal", right)
    mine = whole(engine.gradients(views(model), Batch(x[:4], y[:4])))
    torch.testing.assert_close(mine, plain[:4], rtol=1e-5, atol=1e-7)
    assert [line is None for line in engine._seen.values()] == [True, False]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs a C++ compiler on a processor")
def test_the_real_compiler_keeps_the_bounds():
    """Where it computes a value twice it may round it twice: once for the norm, and otherwise for the sum."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Tanh(), nn.Linear(6, 10)), torch.randn(4, 6), torch.randint(0, 10, (4,))
    engine, clip = Engine(model, F.cross_entropy, (x, y), precision="bfloat16", compiled=True), Clip(1e-2)
    for i in range(len(y)):
        weights = torch.zeros(len(y), dtype=torch.float64)
        weights[i] = 1
        assert clip.c * (1 - 1e-5) <= float(engine(views(model), Batch(x, y, weights), clip).total.norm()) <= clip.c
    assert engine._compile


def test_half_precision_is_near_and_gives_float64(fast_compiler):
    model, x, y = case("images", 32)
    exact = sums(Engine(model, F.cross_entropy, (x, y), compiled=False), model, x, y, Clip(1.0))
    half = sums(Engine(model, F.cross_entropy, (x, y), precision="bfloat16", compiled=False), model, x, y, Clip(1.0))
    assert half.total.dtype == torch.float64
    assert 1e-5 * exact.total.norm() < (half.total - exact.total).norm() < 0.05 * exact.total.norm()
    assert next(model.parameters()).dtype == torch.float32


def test_a_model_follows_its_switch_to_evaluation(fast_compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    for way in (True, False):
        engine = Engine(model, F.cross_entropy, (x, y), precision="bfloat16", compiled=way)
        model.train()
        assert not torch.equal(*(sums(engine, model, x, y, Clip(1.0)).total for _ in range(2)))
        model.eval()
        assert torch.equal(*(sums(engine, model, x, y, Clip(1.0)).total for _ in range(2)))


def test_weights_written_in_place_are_seen(fast_compiler):
    model, x, y = case("frozen layers")
    engine = Engine(model, F.cross_entropy, (x, y), precision="bfloat16", compiled=True)
    parameters, one = views(model), torch.ones(6, dtype=torch.float64)
    before = engine(parameters, Batch(x, y, one), Clip(1.0)).total
    for p in parameters.values():
        p.mul_(2.0)
    assert not torch.equal(engine(parameters, Batch(x, y, one), Clip(1.0)).total, before)


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) if float(self.layer.weight.sum()) < 1e9 else x[:, :3]


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once():
    torch.manual_seed(0)
    model, x, y = LooksAtValues(), torch.randn(4, 4), torch.randint(0, 3, (4,))
    engine = Engine(model, F.cross_entropy, (x, y), name="vmap", compiled=True)
    plain = Engine(model, F.cross_entropy, (x, y), name="vmap", compiled=False)
    with pytest.warns(UserWarning, match="runs uncompiled"):
        found = sums(engine, model, x, y, Clip(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums(engine, model, x, y, Clip(0.1))
    assert torch.equal(found.total, sums(plain, model, x, y, Clip(0.1)).total)


def test_a_compiler_that_is_wrong_is_not_trusted(monkeypatch):
    def wrong(graph, inputs):
        def run(*arguments):
            first, *rest = graph(*arguments)
            return [first * 1.1, *rest]

        return run

    monkeypatch.setattr(compiled, "_BACKEND", wrong)
    model, x, y = case("frozen layers")
    for use in (lambda e: sums(e, model, x, y, Clip(0.1)), lambda e: e.gradients(views(model), Batch(x, y))):
        engine = Engine(model, F.cross_entropy, (x, y), compiled=True)
        with pytest.warns(UserWarning, match="would be rounding"):
            use(engine)


def test_layers_without_a_rule_are_named_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3))
    x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))
    with pytest.warns(UserWarning, match="no fast rule for PReLU") as said:
        Engine(model, F.cross_entropy, (x, y))
    assert len(said) == 1


def test_wrong_knobs_are_refused():
    model, x, y = case("frozen layers")
    with pytest.raises(ModelMixError, match="precision = 'half' is unknown: choose float32"):
        Engine(model, F.cross_entropy, (x, y), precision="half")
    with pytest.raises(ModelMixError, match="engine = 'fast' is unknown"):
        Engine(model, F.cross_entropy, (x, y), name="fast")


def test_precision_and_compiling_do_not_touch_the_ledger(fast_compiler):
    model, x, y = case("frozen layers", 40)
    ledgers = []
    for knobs in ({}, {"precision": "bfloat16", "compiled": True, "chunk": 8}):
        trainer = Trainer(
            model,
            F.cross_entropy,
            (x, y),
            Mechanism(1.0, 0.3, mixing_width=3.0, p=10),
            0.5,
            0.1,
            seed=3,
            performance=Performance(device="cpu", **knobs),
        )
        ledgers.append(trainer.run(3, progress=False).ledger)
    assert ledgers[0] == ledgers[1]


# Attention.


class Attends(nn.Module):
    def __init__(self, way, first=True) -> None:
        super().__init__()
        self.way, self.first = way, first
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=first), nn.Linear(8, 3)

    def forward(self, x):
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        if not self.first:  # positions first inside, samples first outside
            y = x.transpose(0, 1)
            return self.last(self.attention(y, y, y)[0].mean(0))
        ways = {
            "self": lambda: self.attention(x, x, x)[0],
            "no weights": lambda: self.attention(x, x, x, need_weights=False)[0],
            "weights": lambda: self.attention(x, x, x, average_attn_weights=False)[1].mean(1) @ x,
            "cross": lambda: self.attention(x, x * 2, x * 2)[0],
            "three": lambda: self.attention(x, x * 2, x * 3)[0],
            "causal": lambda: self.attention(x, x, x, attn_mask=causal, is_causal=True)[0],
            "additive": lambda: self.attention(x, x, x, attn_mask=causal * -1e4, need_weights=False)[0],
            "padding": lambda: self.attention(x, x, x, key_padding_mask=x[:, :, 0] > 0.8)[0],
            "by name": lambda: self.attention(query=x, key=x, value=x)[0],
        }
        return self.last(ways[self.way]().mean(1))


@pytest.mark.parametrize(
    "way", ["self", "no weights", "weights", "cross", "three", "causal", "additive", "padding", "by name"]
)
def test_attention_in_every_use_of_it(way):
    torch.manual_seed(1)
    model, x, y = Attends(way).double(), torch.randn(4, 5, 8).double(), torch.randint(0, 3, (4,))
    engine = Engine(model, F.cross_entropy, (x, y), compiled=False)
    assert engine.name == "hooks"
    right = Engine(model, F.cross_entropy, (x, y), name="loop", compiled=False)
    for clip in (Clip(1e6), Clip(0.1, 4)):
        mine, wanted = (sums(run, model, x, y, clip).total for run in (engine, right))
        torch.testing.assert_close(mine, wanted, rtol=1e-8, atol=1e-12)


def test_attention_with_positions_first():
    torch.manual_seed(1)
    model, x, y = Attends("self", first=False).double(), torch.randn(4, 5, 8).double(), torch.randint(0, 3, (4,))
    assert Engine(model, F.cross_entropy, (x, y), compiled=False).name == "hooks"


def test_an_attention_that_someone_else_has_changed_is_left_to_them():
    torch.manual_seed(1)
    model, x, y = Attends("self").double(), torch.randn(4, 5, 8).double(), torch.randint(0, 3, (4,))
    genuine = model.attention.forward

    def doubled(*arguments, **named):
        return 2 * genuine(*arguments, **named)[0], None

    model.attention.forward = doubled
    with pytest.warns(UserWarning, match="samples run one at a time"):
        engine = Engine(model, F.cross_entropy, (x, y), compiled=False)
    assert engine.name == "vmap"
    assert model.attention.forward is doubled
    right = Engine(model, F.cross_entropy, (x, y), name="loop", compiled=False)
    mine, wanted = (sums(run, model, x, y, Clip(0.1)).total for run in (engine, right))
    torch.testing.assert_close(mine, wanted, rtol=1e-8, atol=1e-12)


def test_samples_may_come_in_the_precision_of_the_run(fast_compiler):
    model, (x, y) = images(), (torch.randn(6, 3, 4, 4), torch.arange(6))
    flat, one = FlatParameters(model), torch.ones(6, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(model, F.cross_entropy, (x, y), precision="bfloat16", compiled=True)
        found = [engine(flat.views(flat.read()), Batch(given, y, one), Clip(1.0)).total for given in (x, x.bfloat16())]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("p", [1, 9])
def test_another_default_device_changes_nothing_on_a_processor(p):
    model, (x, y) = nn.Sequential(images(), nn.Linear(10, 10)), (torch.randn(6, 3, 4, 4), torch.arange(6))
    trainer = Trainer(
        model, F.cross_entropy, (x, y), Mechanism(1.0, 0.5, mixing_width=4.0, p=p), 0.1, 0.1, seed=1,
        performance=Performance(device="cpu"),
    )  # fmt: skip
    with torch.device("meta"):
        trainer.run(3, progress=False)
    assert bool(torch.isfinite(trainer.state.last).all())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_replayed_unless_it_drops_something(fast_compiler, dropout):
    model, x, y = Words(), torch.randint(0, 20, (6, 7)), torch.arange(6)
    model.block.self_attn.dropout = dropout
    flat, one = FlatParameters(model), torch.ones(6, dtype=torch.float64)
    engine = Engine(model, F.cross_entropy, (x, y), name="hooks", compiled=True)
    engine(flat.views(flat.read()), Batch(x, y, one), Clip(1.0))
    (found,) = engine._compiled.values()
    assert found.draws is (dropout > 0)


@pytest.mark.parametrize("embedded", [False, True])
def test_a_compiled_run_that_drops_something_goes_on_as_it_would_have(fast_compiler, tmp_path, embedded):
    """Compiling tries the model out: it must not use up the random numbers of the step it falls into."""
    x, y = torch.randn(24, 3, 4, 4), torch.randint(0, 10, (24,))
    mechanism = EmbeddingMechanism(1.0, 0.5) if embedded else Mechanism(1.0, 0.5)

    def run(**folder):
        torch.manual_seed(0)
        return Trainer(
            nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Dropout(0.5), nn.Linear(8, 10)), nn.CrossEntropyLoss(),
            (x, y), mechanism, 1.0, 0.5, seed=1, performance=Performance(compiled=True, chunk=8),
            embedding=Embedding((x[:9].clone(), y[:9].clone()), 6) if embedded else None, **folder,
        )  # fmt: skip

    whole = run().run(4, progress=False).state.last
    run(folder=tmp_path).run(2, progress=False)
    assert torch.equal(run(folder=tmp_path, resume=True).run(2, progress=False).state.last, whole)


def test_an_engine_serves_many_models_of_one_builder(fast_compiler):
    """Compiled once, with other weights: the same run as with an engine of its own."""
    x, y = torch.randn(24, 3, 4, 4), torch.randint(0, 10, (24,))
    shared = Engine(images(), nn.CrossEntropyLoss(), (x[:3], y[:3]), compiled=True)
    states = []
    for seed in (1, 2):
        for engine in (None, shared):
            torch.manual_seed(seed)
            run = Trainer(
                images(), nn.CrossEntropyLoss(), (x, y), Mechanism(1.0, 0.5), 1.0, 0.5, seed=seed, engine=engine,
                performance=Performance(compiled=True, chunk=8),
            )  # fmt: skip
            states.append(run.run(3, progress=False).state.last)
    assert len(shared._compiled) == 1
    torch.testing.assert_close(states[0], states[1])
    torch.testing.assert_close(states[2], states[3])
    assert not torch.allclose(states[0], states[2])


@pytest.mark.parametrize(
    "model", [lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10)), Frozen, lambda: images().double()]
)
def test_an_engine_refuses_a_model_that_is_not_its_own(model):
    x, y = torch.randn(24, 3, 4, 4), torch.randint(0, 10, (24,))
    engine = Engine(Frozen() if model is Frozen else images(), nn.CrossEntropyLoss(), (x[:3], y[:3]))
    with pytest.raises(ModelMixError, match="made for another model: leave engine out"):
        engine.require_fit(model())
