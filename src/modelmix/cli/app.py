"""The program: its commands, and what happens when one fails."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer
from click import UsageError

from modelmix.cli.advise import advise
from modelmix.cli.audit import audit
from modelmix.cli.calibrate import calibrate
from modelmix.cli.compare import compare
from modelmix.cli.curve import curve
from modelmix.cli.epsilon import epsilon
from modelmix.cli.once import OnceGroup, Program
from modelmix.cli.report import report
from modelmix.cli.train import TrainCommand, train
from modelmix.cli.verify import verify
from modelmix.errors import ModelMixError


class Root(OnceGroup):
    """The commands of a program."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command by its name, and say where one of older versions is."""
        if args[:1] == ["clip-advice"]:
            raise UsageError("clip-advice is advise clip now", ctx=ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        # Typer would make exit code 130 of it, the same as of a command that has said itself that it stopped.
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = Program(
    name="modelmix",
    cls=Root,
    help="Differential privacy for training, with an epsilon you can check. Every command takes --help.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from modelmix import __version__

        print(f"modelmix {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command("train", cls=TrainCommand)(train)
for _command in (epsilon, calibrate, compare, curve, verify, audit, report):
    app.command(_command.__name__)(_command)
app.add_typer(advise, name="advise")


class _ToStderr(logging.Handler):
    """What the library has to tell those who wait; numbers stay alone on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    run_program(app, "modelmix", arguments)


def run_program(app: typer.Typer, program: str, arguments: list[str] | None = None) -> NoReturn:
    """Run a command. Every failure a user can cause ends in one line on stderr and exit code 2."""
    # Threads of torch that spin while they wait make a busy machine many times slower; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    log = logging.getLogger("modelmix")
    log.setLevel(logging.INFO)
    log.handlers = [_ToStderr()]
    arguments = sys.argv[1:] if arguments is None else arguments
    command = typer.main.get_command(app)
    try:
        with _terminable():
            code = command.main(args=arguments or ["--help"], prog_name=program, standalone_mode=False)
            sys.stdout.flush()  # here, where a full disk can still be told of
    except ModelMixError as error:
        _fail(program, str(error))
    except (KeyboardInterrupt, typer.Abort):
        print(f"{program}: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()  # its reader went away: leave quietly
        sys.exit(1)
    except OSError as error:
        _drop_output()
        what = "cannot write the output" if error.filename is None else f"cannot use {error.filename}"
        _fail(program, f"{what}: {error.strerror or error}.")
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        _fail(program, f"{message().rstrip('.?')}. See {program} {_named(command, arguments)}--help.")
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises here, so that what is half-written is removed and a run keeps its last state, as after Ctrl-C."""
    # Only the main thread may say what a signal does, and whoever called us may have said it already.
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)  # what a shell says of a process that died of this signal


def _named(command: Any, arguments: list[str]) -> str:
    """The commands that the arguments begin with, each with a space after it."""
    out = ""
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument)
        if command is None:
            break
        out += f"{argument} "
    return out


def _drop_output() -> None:
    """Keep Python from complaining at exit that it cannot write what is left."""
    with suppress(OSError, ValueError):  # io.UnsupportedOperation is both
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(program: str, message: str) -> NoReturn:
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
