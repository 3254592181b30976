"""Exit codes, and the classes of commands and options that all commands use."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import click

from purgatoryd.shm_layout import errors


class Exit(IntEnum):
    """Exit codes of all commands. The numbers are stable."""

    DONE = 0
    NEGATIVE = 1
    USAGE = 2
    NO_DAEMON = 3
    REFUSED = 4
    BROKEN = 5
    TIMEOUT = 6
    UNUSABLE = 7
    NOTICES_LOST = 8
    OTHER = 9
    BUG = 70
    INTERRUPTED = 130


MEANING = {
    Exit.DONE: "done",
    Exit.NEGATIVE: "no: unknown key, already fired, no notice, not drained, degraded",
    Exit.USAGE: "invalid argument or setting; nothing was sent to the daemon",
    Exit.NO_DAEMON: "no daemon of that name, or its arena is not ready",
    Exit.REFUSED: "refused: key exists, table full, deadline too far, permission denied",
    Exit.BROKEN: "corruption: broken arena invariant, damaged WAL or lake, failed audit",
    Exit.TIMEOUT: "no answer in time (the call may still be applied once); frozen daemon",
    Exit.UNUSABLE: "unusable path, arena file or machine",
    Exit.NOTICES_LOST: "the listener fell behind and lost notices; the error names the range",
    Exit.OTHER: "another error in the communication with the daemon",
    Exit.BUG: "a bug in purgatoryd; please report the traceback",
    Exit.INTERRUPTED: "interrupted by SIGINT",
}

# Exit code by error class. The first row whose class matches decides.
_BY_ERROR: tuple[tuple[type[Exception], Exit], ...] = (
    (errors.InvalidArgument, Exit.USAGE),
    (errors.Refused, Exit.REFUSED),
    (errors.BatchError, Exit.REFUSED),
    (errors.MessageRefused, Exit.REFUSED),
    (errors.DaemonFrozen, Exit.TIMEOUT),
    (errors.DaemonUnreachable, Exit.NO_DAEMON),
    (errors.ShardUnavailable, Exit.NO_DAEMON),
    (errors.ArenaMissing, Exit.NO_DAEMON),
    (errors.ArenaNotReady, Exit.NO_DAEMON),
    (errors.CallTimeout, Exit.TIMEOUT),
    (errors.QueueFull, Exit.TIMEOUT),
    (errors.ArenaBroken, Exit.BROKEN),
    (errors.WalDamaged, Exit.BROKEN),
    (errors.TableBroken, Exit.BROKEN),
    (errors.LakeBroken, Exit.BROKEN),
    (errors.PermissionDenied, Exit.REFUSED),
    (errors.ArenaError, Exit.UNUSABLE),
    (errors.SystemFailure, Exit.UNUSABLE),
    (errors.ExtraMissing, Exit.UNUSABLE),
    (errors.LakeInUse, Exit.UNUSABLE),
    (errors.LakeMismatch, Exit.UNUSABLE),
    (errors.BulkLoadRefused, Exit.REFUSED),
    (errors.ParkedElsewhere, Exit.UNUSABLE),
    (errors.WindowElsewhere, Exit.UNUSABLE),
    (errors.WindowTaken, Exit.UNUSABLE),
    (errors.StartError, Exit.UNUSABLE),
    (errors.Lagged, Exit.NOTICES_LOST),
    (errors.PurgatorydError, Exit.OTHER),
)

_PASSED_ON = frozenset(Exit) - {Exit.DONE, Exit.NEGATIVE}
"""Exit codes of a failed shard that the deployment also uses, because they show why the shard
failed."""


def exit_of(error: errors.PurgatorydError) -> Exit:
    """Return the exit code of an error."""
    if isinstance(error, errors.ShardFailed) and error.code in _PASSED_ON:
        return Exit(error.code)
    return exit_of_class(type(error))


def exit_of_class(kind: type[errors.PurgatorydError]) -> Exit:
    """Return the exit code of an error class."""
    return next(code for known, code in _BY_ERROR if issubclass(kind, known))


def figures(error: Exception) -> dict[str, Any]:
    """Return the attributes of an error by name; empty for errors that purgatoryd does not
    define."""
    return {name: getattr(error, name) for name in getattr(error, "figures", ())}


def report(error: errors.PurgatorydError, as_json: bool) -> Exit:
    """Print an error on stderr, as text or as one JSON object; return its exit code."""
    from purgatoryd.daemon.log import line_prefix

    reported = {"error": type(error).__name__, "message": str(error), **figures(error)}
    say(
        json.dumps(reported, default=str)
        if as_json
        else f"{line_prefix('error')}purgatoryd: {error}"
    )
    return exit_of(error)


def say(text: str) -> None:
    """Print a line on stderr. If this process is a daemon, do not wait until the line is read.

    A daemon writes the line through its log, unless sys.stderr was replaced.
    """
    from purgatoryd.daemon.log import log

    if log.writes and sys.stderr is sys.__stderr__:
        log.last_words(text)
    else:
        click.echo(text, err=True)


@contextmanager
def errors_as_exit_codes(as_json: bool) -> Iterator[None]:
    """Return a context manager in which errors end the command with an exit code, without a
    traceback."""
    try:
        yield
    except click.exceptions.Exit:
        raise
    except click.UsageError as error:
        if not as_json:
            raise  # click prints the usage and the error
        reported = {"error": type(error).__name__, "message": error.format_message()}
        click.echo(json.dumps(reported), err=True)
        raise click.exceptions.Exit(Exit.USAGE) from error
    except errors.PurgatorydError as error:
        raise click.exceptions.Exit(report(frozen(error) or error, as_json)) from error
    except BrokenPipeError:  # the reader of the output has ended, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(Exit.DONE) from None
    except KeyboardInterrupt:
        raise click.exceptions.Exit(Exit.INTERRUPTED) from None
    except Exception as error:
        from purgatoryd.cli.foreign_errors import translated

        if (ours := translated(error)) is None:
            raise
        raise click.exceptions.Exit(report(ours, as_json)) from error


FROZEN_NS = 5_000_000_000
"""A daemon whose loop has stood still for longer than this is frozen. A healthy loop moves every
second."""

UNANSWERED_NS = 2_000_000_000
"""Like FROZEN_NS, for a daemon that has not answered a call."""


def frozen(error: errors.PurgatorydError) -> errors.DaemonFrozen | None:
    """Return DaemonFrozen if the daemon did not answer because its loop does not move."""
    from purgatoryd.cli.status import health_of

    if type(error) is not errors.DaemonUnreachable or not error.waited_s or error.shut:
        return None
    try:
        health = health_of(error.name, UNANSWERED_NS)
    except (errors.PurgatorydError, OSError):
        return None
    if health.condition != "frozen":
        return None
    return errors.DaemonFrozen(**figures(error), pid=health.pid, still_ns=health.still_ns)


ARGUMENTS = "purgatoryd.arguments"
"""Key in click.Context.meta under which the arguments of the command are stored."""


class GroupedOption(click.Option):
    """An option that --help lists under `heading`; an empty heading means "Options"."""

    def __init__(self, *declared: Any, heading: str = "", **settings: Any) -> None:
        super().__init__(*declared, **settings)
        self.heading = heading


class HelpNames(click.Command):
    """A command with the options -h and --help, whatever context it first runs in."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """Return the same names in each context, because click caches the first help option."""
        return ["-h", "--help"]


class Group(HelpNames, click.Group):
    """A group of commands."""


class Command(HelpNames):
    """A command that translates each result and error into an exit code."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Parse the arguments. Errors in them, such as invalid settings, end the command."""
        given = tuple(args)
        with errors_as_exit_codes("--json" in args):
            ctx = super().make_context(info_name, args, *rest, **extra)
        ctx.meta[ARGUMENTS] = given
        return ctx

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, options without a heading first."""
        sections: dict[str, list[tuple[str, str]]] = {"": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and isinstance(parameter, click.Option):  # click 8.5 lists arguments too
                heading = parameter.heading if isinstance(parameter, GroupedOption) else ""
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading or "Options"):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> None:
        """Run the command and exit with the code that it returns, 0 if it returns None."""
        with errors_as_exit_codes(bool(ctx.params.get("as_json"))):
            ctx.exit(int(super().invoke(ctx) or Exit.DONE))


def help_table() -> str:
    """Return the exit codes as a paragraph of --help that click does not wrap."""
    rows = "\n".join(f"  {code.value:>3}  {text}" for code, text in MEANING.items())
    return f"\b\nExit codes:\n{rows}"
