"""A ledger is data, and it notices when it was touched."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import modelmix as mm
from modelmix.accounting.ledger import Phase
from modelmix.accounting.pld import pld_epsilon

A, B = mm.Mechanism(0.335, 0.03, 11.25, 100), mm.Mechanism(2.0, 0.01, law="laplace")
LEDGER = mm.Ledger().add(A, 300).add(B, 20).add(A, 1)


def test_keeps_order_and_merges_equal_neighbours():
    assert [(p.mechanism, p.steps) for p in LEDGER.phases] == [(A, 300), (B, 20), (A, 1)]
    longer = LEDGER.add(A, 4).add(A)
    assert [p.steps for p in longer.phases] == [300, 20, 6]
    assert LEDGER.steps == 321
    assert LEDGER.phases[-1].steps == 1, "the first ledger has not changed"


def test_round_trip(tmp_path):
    assert mm.Ledger.from_json(LEDGER.to_json()) == LEDGER
    path = tmp_path / "ledger.json"
    LEDGER.save(path)
    assert mm.Ledger.load(path) == LEDGER
    assert [entry.name for entry in tmp_path.iterdir()] == ["ledger.json"], "no temporary file is left"
    assert mm.epsilon(mm.Ledger.load(path), 1e-5) == mm.epsilon(LEDGER, 1e-5)
    assert mm.Ledger.from_json(mm.Ledger().to_json()) == mm.Ledger()


@given(
    z=st.floats(1e-3, 1e3), q=st.floats(1e-9, 1), omega=st.floats(0, 1e6), p=st.integers(1, 10**7),
    steps=st.integers(1, 10**12),
)  # fmt: skip
def test_every_number_survives(z, q, omega, p, steps):
    ledger = mm.Ledger().add(mm.Mechanism(z, q, omega, p), steps)
    assert mm.Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.parametrize("cut", range(0, len(LEDGER.to_json()) - 2, 23))
def test_truncated_anywhere(cut):
    with pytest.raises(mm.ModelMixError) as error:
        mm.Ledger.from_json(LEDGER.to_json()[:cut])
    assert "\n" not in str(error.value)


@given(data=st.data())
def test_edited_anywhere(data):
    """Change one digit or letter: the ledger is refused, or reads as the very same ledger."""
    text = LEDGER.to_json()
    where = data.draw(st.sampled_from([i for i, c in enumerate(text) if c.isalnum()]))
    new = data.draw(st.sampled_from("0123456789abcdefz").filter(lambda c: c != text[where]))
    edited = text[:where] + new + text[where + 1 :]
    if json.loads(text) == _loads(edited):
        assert mm.Ledger.from_json(edited) == LEDGER
        return
    with pytest.raises(mm.ModelMixError) as error:
        mm.Ledger.from_json(edited)
    assert "\n" not in str(error.value)


def _loads(text):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "something-else"}, "schema"),
        ({"version": 4}, "version 4 is unknown"),
        ({"version": None}, "version"),
        ({"phases": {}}, "phases"),
        ({"extra": 1}, "exactly"),
        ({"digest": "sha256:0"}, "edited"),
    ],
)
def test_unknown_content_is_refused(change, message):
    with pytest.raises(mm.ModelMixError, match=message):
        mm.Ledger.from_json(json.dumps({**json.loads(LEDGER.to_json()), **change}))


@pytest.mark.parametrize("text", ["", "null", "[]", "3", '"x"', "{}"])
def test_other_json_is_refused(text):
    with pytest.raises(mm.ModelMixError):
        mm.Ledger.from_json(text)


@pytest.mark.parametrize(
    "phases",
    [
        [3],
        [{}],
        [{"steps": 1}],
        [{**A.as_dict(), "steps": 0}],
        [{**A.as_dict(), "steps": 1.5}],
        [{**A.as_dict(), "steps": 1, "p": 2.5}],
        [{**A.as_dict(), "steps": 1, "law": None}],
    ],
)
def test_bad_phases_with_a_good_digest_are_refused(phases):
    from modelmix.accounting.ledger import SCHEMA, VERSION, _digest

    body = {"schema": SCHEMA, "version": VERSION, "phases": phases}
    with pytest.raises(mm.ModelMixError):
        mm.Ledger.from_json(json.dumps({**body, "digest": _digest(body)}))


@pytest.mark.parametrize(
    "text",
    [
        LEDGER.to_json().replace('"steps": 300', '"steps": 999999, "steps": 300'),
        LEDGER.to_json().replace('"phases"', '"phases": [], "phases"', 1),
        LEDGER.to_json().replace('"steps": 300', '"steps": ' + "9" * 5000),
        "[" * 200_000,
        '{"schema": "modelmix-ledger", "version": NaN}',
    ],
    ids=["repeated steps", "repeated phases", "endless number", "endless nesting", "not a number"],
)
def test_tricks_with_json_are_refused(text):
    with pytest.raises(mm.ModelMixError):
        mm.Ledger.from_json(text)


def test_a_version_is_a_number():
    from modelmix.accounting.ledger import SCHEMA, _digest

    body = {"schema": SCHEMA, "version": True, "phases": []}
    with pytest.raises(mm.ModelMixError, match="version"):
        mm.Ledger.from_json(json.dumps({**body, "digest": _digest(body)}))


@pytest.mark.parametrize("steps", [0, -999, 0.5, float("nan"), 10**400, True])
def test_phases_are_checked_however_they_are_made(steps):
    for make in (lambda: Phase(A, steps), lambda: mm.Ledger().add(A, steps)):
        with pytest.raises(mm.ModelMixError):
            make()
    with pytest.raises(mm.ModelMixError):
        mm.Ledger(((A, 3),))
    with pytest.raises(mm.ModelMixError):
        Phase("a mechanism", 3)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(mm.ModelMixError, match="cannot read"):
        mm.Ledger.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(mm.ModelMixError, match="not a text file"):
        mm.Ledger.load(tmp_path / "binary.json")
    with pytest.raises(mm.ModelMixError, match="folder"):
        LEDGER.save(tmp_path)
    with pytest.raises(mm.ModelMixError, match="cannot write"):
        LEDGER.save(tmp_path / "binary.json" / "ledger.json")
    LEDGER.save(tmp_path / "new" / "folder" / "ledger.json")
    assert mm.Ledger.load(tmp_path / "new" / "folder" / "ledger.json") == LEDGER


def test_one_ledger_after_another_holds_both_and_what_either_breaks():
    one, two = mm.Mechanism(1.0, 0.1), mm.Mechanism(2.0, 0.1)
    first, second = mm.Ledger().add(one, 2), mm.Ledger().add(one, 3).add(two, 1)
    assert first.then(second) == mm.Ledger().add(one, 5).add(two, 1)
    assert first.then(mm.Ledger()) == first == mm.Ledger().then(first)
    for a, b in ((mm.Ledger(unproved=("a rule",)), second), (first, mm.Ledger(unproved=("a rule",)))):
        assert a.then(b).unproved == ("a rule",)


def signed(drop=(), **change):
    """A ledger file with a good digest, whatever it says."""
    from modelmix.accounting.ledger import _digest

    body = {k: v for k, v in json.loads(LEDGER.to_json()).items() if k not in ("digest", *drop)} | change
    return json.dumps({**body, "digest": _digest(body)})


CLAIM = ("adjacency", "unit", "population", "populations", "seeded")


def test_a_ledger_of_a_broken_rule_says_which_and_an_honest_one_says_none(tmp_path):
    """Version 3 always has a list of broken rules, version 2 a list that is not empty, and version 1 none at all."""
    broken = mm.Ledger(unproved=("a rule",)).add(A, 2)
    assert json.loads(broken.to_json())["version"] == 3
    assert mm.Ledger.from_json(broken.to_json()) == broken
    assert json.loads(LEDGER.to_json())["unproved"] == []
    for change, message in (
        ({"version": 2, "drop": CLAIM}, "at least one broken rule"),
        ({"version": 2}, "exactly"),
        ({"version": 1, "drop": CLAIM}, "exactly"),
        ({"drop": ["unproved"]}, "exactly"),
        ({"drop": ["seeded"]}, "exactly"),
        ({"unproved": "a rule"}, "exactly"),
        ({"unproved": ["a rule"], "phases": {}}, "exactly"),
        ({"unproved": [""]}, "in words"),
        ({"unproved": [3]}, "in words"),
        ({"seeded": 1}, "true or false"),
        ({"adjacency": "replace-one"}, "zero-out or add-or-remove"),
        ({"adjacency": "add-or-remove"}, "needs a population"),
        ({"version": 0}, "version 0 is unknown"),
    ):
        with pytest.raises(mm.ModelMixError, match=message):
            mm.Ledger.from_json(signed(**change))
        path = tmp_path / "bad.json"
        path.write_text(signed(**change))
        with pytest.raises(mm.ModelMixError, match=f"bad.json: .*{message}"):
            mm.Ledger.load(path)
    old = signed(drop=CLAIM, version=2, unproved=["a rule"])
    assert mm.Ledger.from_json(old) == mm.Ledger(LEDGER.phases, ("a rule",), adjacency="zero-out")
    assert mm.Ledger.from_json(signed(drop=(*CLAIM, "unproved"), version=1)) == LEDGER
    for ask in (lambda: mm.epsilon(broken, 1e-5), lambda: pld_epsilon(broken, 1e-5), broken.require_proof):
        with pytest.raises(mm.UnprovedError, match="a rule"):
            ask()
    assert mm.Ledger.from_json(signed()) == LEDGER


def test_lists_become_tuples_so_that_ledgers_can_be_compared_and_hashed():
    one = mm.Ledger(list(LEDGER.phases), ["a rule"])
    assert hash(one) == hash(mm.Ledger(LEDGER.phases, ("a rule",)))
    assert type(one.phases) is type(one.unproved) is tuple


def test_the_digest_does_not_depend_on_the_order_of_keys():
    data = json.loads(LEDGER.to_json())
    assert mm.Ledger.from_json(json.dumps(dict(reversed(list(data.items()))))) == LEDGER


def test_a_step_has_the_mechanism_of_its_phase():
    assert [LEDGER.mechanism_at(step) for step in (1, 300, 301, 320, 321)] == [A, A, B, B, A]
    with pytest.raises(mm.ModelMixError, match="step 322 is past the end of a ledger of 321 steps"):
        LEDGER.mechanism_at(322)


def test_fields_come_in_the_order_of_a_file_and_laws_by_name():
    kind = mm.EmbeddingMechanism(1.0, 0.1)
    assert list(kind.as_dict())[:6] == list(A.as_dict())
    assert list(kind.as_dict())[6:] == ["clip_ratio"]
    with pytest.raises(mm.ModelMixError, match="law = 3 is unknown"):
        mm.Mechanism.from_dict({**A.as_dict(), "law": 3})
    with pytest.raises(mm.ModelMixError):
        mm.EmbeddingMechanism(-1.0, 0.1)
    assert mm.EmbeddingMechanism(1, 1, 2, 4.0) == mm.EmbeddingMechanism(1.0, 1.0, 2.0, 4)
    assert type(mm.EmbeddingMechanism(1, 1, 2, 4.0).p) is int
