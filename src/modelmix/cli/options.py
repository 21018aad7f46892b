"""The options that describe a mechanism, shared by every command that takes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
from msgspec import Meta
from msgspec.structs import fields as struct_fields

from modelmix._checks import check_delta, rate, whole
from modelmix.accounting.adjacency import ADD_OR_REMOVE, ADJACENCIES, ZERO_OUT
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism, mixing_width
from modelmix.accounting.runs import load_claim
from modelmix.config.recipe import PLACES, TABLES
from modelmix.config.tables import parse_value, parts
from modelmix.errors import ModelMixError

_RATIOS, _PAPER, _OTHER = "Mechanism, as ratios", "Mechanism, in the paper's units", "Accounting"
RUN = "advanced"

ADJACENCY_HELP = f"For which neighbours: {', '.join(ADJACENCIES)}; default: what the run can claim."

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def _option(names: str, text: str, panel: str) -> Any:
    return typer.Option(*names.split(","), help=text, rich_help_panel=panel, show_default=False)


DataDir = Annotated[
    Path | None,
    _option("--data-dir", "Where public data lie; default: MODELMIX_DATA or ~/.cache/modelmix.", RUN),
]
Device = Annotated[str | None, _option("--device", "cpu, cuda; default: what is there.", RUN)]
Engine = Annotated[str, _option("--engine", "auto, hooks, vmap or loop.", RUN)]
Chunk = Annotated[int | None, _option("--chunk", "Samples whose gradients are held at once.", RUN)]
Precision = Annotated[
    str | None, _option("--precision", "float32, bfloat16: the model's arithmetic; no effect on epsilon.", RUN)
]
Compiled = Annotated[bool | None, _option("--compile/--no-compile", "Compile the model; default: on a GPU.", RUN)]


class Knobs(NamedTuple):
    """The arguments of ``Performance``, before torch is loaded."""

    device: str | None
    engine: str
    precision: str | None
    compiled: bool | None
    chunk: int | None


class Counted(NamedTuple):
    """What is accounted for, and what has to be said about where it comes from."""

    ledger: Ledger
    notes: list[str]


@dataclass(frozen=True)
class MechanismOptions:
    """What the user said about the mechanism; anything may be missing until a command asks for it."""

    z: Annotated[float | None, _option("--z", "Noise multiplier: noise scale / clip.", _RATIOS)] = None
    omega: Annotated[
        float | None, _option("--omega", "Mixing width / clip, (tau/eta)*B/c; 0 is plain DP-SGD.", _RATIOS)
    ] = None
    p: Annotated[float | None, _option("--p", "Truncation: coordinates at most c/sqrt(p). 1 is none.", _RATIOS)] = None
    q: Annotated[float | None, _option("--q", "Poisson sampling rate.", _RATIOS)] = None
    steps: Annotated[float | None, _option("--steps", "Number of steps T.", _RATIOS)] = None
    law: Annotated[str | None, _option("--law", "Noise law: gaussian (l2 clip) or laplace (l1 clip).", _RATIOS)] = None
    d: Annotated[float | None, _option("--d", "Trained coordinates; matters only below p.", _RATIOS)] = None
    c: Annotated[float | None, _option("--clip,--c", "Clip c of a sample's gradient.", _PAPER)] = None
    n: Annotated[float | None, _option("--n", "Number of samples n, public in the guarantee.", _PAPER)] = None
    population: Annotated[
        float | None,
        _option("--population", "Instead of --n: a public constant that does not move with the data.", _PAPER),
    ] = None
    batch: Annotated[float | None, _option("--batch,--B", "Expected batch B = q*n, instead of --q.", _PAPER)] = None
    tau: Annotated[float | None, _option("--tau", "Mixing threshold tau.", _PAPER)] = None
    eta: Annotated[float | None, _option("--eta", "Step size eta; left out, tau is read in units of eta.", _PAPER)] = (
        None
    )
    ledger: Annotated[
        list[Path] | None,
        _option(
            "--ledger", "Ledger file or run folder, counted before what options describe. May be repeated.", _OTHER
        ),
    ] = None
    delta: Annotated[float, typer.Option("--delta", help="Failure probability.", rich_help_panel=_OTHER)] = 1e-5

    @property
    def describes_a_phase(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self) if f.name not in ("ledger", "delta"))

    @property
    def samples(self) -> int | None:
        """What batches and widths are shares of: the number of samples, or the population; None if not known."""
        if self.n is not None and self.population is not None:
            raise ModelMixError("--n and --population are two claims: give the one that is public.")
        if self.population is not None:
            return whole("population", self.population, "the population", least=1)
        return None if self.n is None else whole("n", self.n, "the number of samples", least=1)

    def in_ratios(self) -> MechanismOptions:
        """The same options with q and omega worked out from the paper's units."""
        q, omega, many = self.q, self.omega, self.samples
        if self.batch is not None:
            if q is not None:
                raise ModelMixError("--q and --batch say the same thing: give one of them.")
            if many is None:
                raise ModelMixError("--batch needs --n, the number of samples, or --population: q = B/n.")
            q = rate("q = B/n", self.batch / many, "the sampling rate")
        if self.tau is not None:
            if omega is not None:
                raise ModelMixError("--omega and --tau say the same thing: give one of them.")
            missing = [name for name, value in (("--clip", self.c), ("--n", many)) if value is None]
            if q is None:
                missing.append("--q or --batch")
            if missing:
                raise ModelMixError(f"--tau needs {', '.join(missing)} as well: omega = (tau/eta)*q*n/c.")
            expected_batch = q * many  # type: ignore[operator]
            eta = 1.0 if self.eta is None else self.eta
            omega = mixing_width(self.c, self.tau, eta, expected_batch)  # type: ignore[arg-type]
        elif self.c is not None or self.eta is not None:
            raise ModelMixError(
                "--clip and --eta only serve to work out omega from --tau: give --tau, or leave them out."
            )
        return replace(self, q=q, omega=omega, batch=None, tau=None, c=None, eta=None)

    def require(self, *names: str) -> None:
        """Refuses to go on without these ratios."""
        missing = [f"--{name}" for name in names if getattr(self, name) is None]
        if missing:
            raise ModelMixError(f"{', '.join(missing)} missing: a phase needs --z, --q and --steps (see --help).")

    def mechanism(self) -> Mechanism:
        """The mechanism the options describe."""
        ratios = self.in_ratios()
        ratios.require("z", "q")
        return Mechanism(
            noise_multiplier=ratios.z,  # type: ignore[arg-type]
            sample_rate=ratios.q,  # type: ignore[arg-type]
            mixing_width=0.0 if ratios.omega is None else ratios.omega,
            p=1 if ratios.p is None else ratios.p,  # type: ignore[arg-type]
            law=ratios.law or "gaussian",
            dimension=ratios.d,  # type: ignore[arg-type]
        )

    def counted(self) -> Counted:
        """Everything that every --ledger counts as, then the phase that the other options describe."""
        out = Ledger()
        notes: list[str] = []
        for path in self.ledger or ():
            found = load_claim(path)
            out = out.then(found.ledger)
            notes += [line for line in (*found.notes, *found.caveats) if line not in notes]
        if self.describes_a_phase:
            self.in_ratios().require("z", "q", "steps")
            out = out.then(self.claim(out.population).add(self.mechanism(), self.steps))  # type: ignore[arg-type]
        if not out.phases:
            raise ModelMixError("nothing to account for: give --z, --q and --steps (see --help), or --ledger FILE.")
        check_delta(self.delta, out.populations)
        return Counted(out, notes)

    def claim(self, known: int | None = None) -> Ledger:
        """An empty ledger with what the options can claim; ``known`` is the number of samples if they name none."""
        if self.population is not None:
            return Ledger(adjacency=ADD_OR_REMOVE, population=self.samples)
        return Ledger(adjacency=ZERO_OUT, population=self.samples or known)

    def one_phase(self) -> Counted:
        """A ledger of one phase with all that it claims, for commands that vary one of its numbers."""
        found = self.counted()
        found.ledger.require_proof()
        if len(found.ledger.phases) != 1:
            raise ModelMixError("this command takes one phase: give a ledger of one phase, or the options of one.")
        return found


def takes_mechanism(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; it receives them as its argument ``options``."""
    hints = get_type_hints(MechanismOptions, include_extras=True)
    shared = {f.name: _keyword(f.name, hints[f.name], f.default) for f in fields(MechanismOptions)}
    return _with_options(command, "options", shared, lambda given: MechanismOptions(**given))


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of recipes, and --set; it receives as its argument ``changes`` what was given."""
    shared = {place: parameter for place in PLACES if (parameter := _recipe_option(place)) is not None}
    shared[_SET] = _keyword("settings", Annotated[list[str] | None, _option("--set", _SET_HELP, "advanced")], None)
    return _with_options(command, "changes", shared, _changes)


_SET = "--set"
_SET_HELP = "Any other key of a recipe, as TABLE.KEY=VALUE. May be repeated."


def _recipe_option(place: str) -> inspect.Parameter | None:
    """The option that sets a key of a recipe, if it has one of its own."""
    title, _, name = place.partition(".")
    hint = next(field.type for field in struct_fields(TABLES[title]) if field.name == name)
    meta = next((part for part in parts(hint) if isinstance(part, Meta)), Meta())
    option = (meta.extra or {}).get("option")
    if option is None:
        return None
    kind: Any = next((part for part in parts(hint) if part in (str, int, float)), str)
    kind = list[str] if list[str] in parts(hint) else kind
    panel = {"privacy": "privacy", "run": "advanced"}.get(title, "basic")
    annotation = Annotated[kind | None, _option(option, meta.description or "", panel)]
    return _keyword(option.lstrip("-").replace("-", "_"), annotation, None)


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    changes = {place: value for place, value in given.items() if place != _SET and value is not None}
    settings = read_settings(given[_SET] or ())
    for place in changes.keys() & settings.keys():
        raise ModelMixError(f"{place} was given 2 times and only one value can count: give it once.")
    return {**changes, **settings}


def read_settings(given: Iterable[str]) -> dict[str, Any]:
    """Return what --set was given, by table and key."""
    out: dict[str, Any] = {}
    for text in given:
        place, equals, value = text.partition("=")
        if not equals:
            raise ModelMixError(f"--set {text} sets nothing: write --set TABLE.KEY=VALUE, as in privacy.delta=1e-6.")
        if place in out:
            raise ModelMixError(f"{place} was given 2 times and only one value can count: give it once.")
        out[place] = parse_value(value)
    return out


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_options(
    command: Callable[..., None],
    name: str,
    shared: Mapping[str, inspect.Parameter],
    collect: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """A command with more options, of which it receives what ``collect`` makes, as its argument ``name``."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != name
    ]

    def run(**arguments: Any) -> None:
        given = collect({key: arguments.pop(parameter.name) for key, parameter in shared.items()})
        command(**{name: given}, **arguments)

    parameters = [*shared.values(), *own]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
