"""The commands pipeline audit and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import emit, json_option
from purgatoryd.cli.pipeline import lake_option, spark_options
from purgatoryd.shm_layout.errors import BadPath

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from purgatoryd.pipeline.audit import Verdict
    from purgatoryd.pipeline.continuity import Coverage
    from purgatoryd.pipeline.figures import Profile
    from purgatoryd.pipeline.whole import Whole

_wal_option = click.option(
    "--wal-dir",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    envvar="PURGATORYD_WAL_DIR",
    show_envvar=True,
    help="Directory of WALs whose unshipped records are also audited.",
)
_ledger_option = click.option(
    "--ledger",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Directory of ledgers to compare with the WALs.",
)
_coverage_option = click.option(
    "--require-coverage",
    "required",
    type=units.Percent(),
    default="0%",
    show_default=True,
    help="Exit with code 5 unless at least this share of the WALs' records was judged.",
)
_COLOURS = {"red": "red", "amber": "yellow", "green": "green"}


def _audit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select what to audit."""
    return lake_option(_wal_option(_ledger_option(_coverage_option(spark_options(command)))))


class _Read(NamedTuple):
    whole: Whole
    ledger: DataFrame | None


@contextmanager
def _read(
    lake: Path, wal_dir: Path | None, ledger: Path | None, master: str | None, conf: dict[str, str]
) -> Iterator[_Read]:
    from purgatoryd.pipeline.lake import Lake
    from purgatoryd.pipeline.ledger import read_ledgers
    from purgatoryd.pipeline.session import session
    from purgatoryd.pipeline.sources import wals_in
    from purgatoryd.pipeline.whole import whole

    if wal_dir:
        lake.mkdir(parents=True, exist_ok=True)  # an audit does not need shipped files
    there = Lake(lake)
    folders = wals_in(wal_dir) if wal_dir else []
    spark = session(master, conf)
    noted = read_ledgers(spark, ledger) if ledger else None
    with whole(spark, there, folders) as found:
        yield _Read(found, noted)


@click.command("audit", cls=Command)
@_audit_options
@json_option
def audit_command(required: float, as_json: bool, **options: Any) -> int:
    """Check the WALs for violations of the daemon's guarantees.

    Each timer and operation must be open or have exactly one final state. Nothing may have fired
    early, no record or notice number may be missing, conditions must have held, and snapshots must
    agree. With --ledger, workers and subscribers must have received what the WALs say.

    The verdict includes the coverage, and the ranges of records that are missing or were not
    judged. Exit code 5 means a violation or a coverage below --require-coverage. Exit code 1 means
    that there was nothing to audit.
    """
    from purgatoryd.pipeline.audit import audit

    with _read(**options) as read:
        verdict = audit(*read.whole, read.ledger)
    _show(verdict, as_json)
    return _exit(verdict, required)


def _exit(verdict: Verdict, required: float) -> Exit:
    if verdict.counts:
        return Exit.BROKEN
    if required and not verdict.coverage.reaches(required):
        found, least = _percent(verdict.coverage), f"{100 * required:.9g} %"
        click.echo(f"purgatoryd: coverage is {found}; --require-coverage is {least}", err=True)
        return Exit.BROKEN
    return Exit.DONE if verdict.clean else Exit.NEGATIVE


def _show(verdict: Verdict, as_json: bool) -> None:
    for one in verdict.lost:
        upto = "?" if one.last_lsn is None else one.last_lsn
        text = f"missing    {one.daemon[:8]} LSN {one.first_lsn}..{upto}: {one.cause}"
        emit({"missing": one._asdict()}, text, as_json)
    for one in verdict.coverage.ranges:
        if one not in verdict.lost:
            text = f"not judged {one.daemon[:8]} LSN {one.first_lsn}..{one.last_lsn}: {one.cause}"
            emit({"not_judged": one._asdict()}, text, as_json)
    for left in verdict.unjudged:
        text = f"not judged {left.daemon[:8]} {left.lines:,} lines of ledgers: {left.cause}"
        emit({"unjudged": left._asdict()}, text, as_json)
    for v in verdict.samples:
        text = (
            f"{v.kind:<22} {v.daemon[:8]} LSN {v.lsn or '-'} ticket {v.ticket or '-'} {v.evidence}"
        )
        emit({"violation": v._asdict()}, text, as_json)
    for balance in verdict.balance if as_json else ():
        emit({"balance": asdict(balance)}, "", as_json)
    silent = verdict.ledger.get("armed_without_ledger", 0)
    if silent and not as_json:
        click.echo(f"in no ledger {silent:,} timers and operations that were armed")
    if as_json:
        emit(_summary(verdict), "", as_json)
    else:
        click.secho(_verdict(verdict), fg=_COLOURS[verdict.colour])


def _verdict(verdict: Verdict) -> str:
    if not verdict.records:
        return "0 records: nothing to audit"
    known = verdict.coverage
    found = verdict.counts or "no violation"
    return (
        f"{verdict.records:,} records: {found}; coverage {_percent(known)}: {known.judged:,} judged"
        f" of {known.shipped:,} in the lake and {known.had:,} that the WALs had"
    )


def _percent(coverage: Coverage) -> str:
    from purgatoryd.pipeline.report import percent

    return percent(coverage)


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return {
        "judged": coverage.judged, "shipped": coverage.shipped, "had": coverage.had,
        "share": coverage.share, "exact": coverage.is_exact, "whole": coverage.is_whole,
    }  # fmt: skip


def _summary(verdict: Verdict) -> dict[str, Any]:
    return {
        "verdict": verdict.colour, "coverage": _coverage(verdict.coverage),
        "records": verdict.records, "unknown": verdict.unknown, "clean": verdict.clean,
        "violations": verdict.counts, "ledger": verdict.ledger,
    }  # fmt: skip


@click.command("report", cls=Command)
@_audit_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="File to which the page is written.",
)
@json_option
def report_command(out: Path, required: float, as_json: bool, **options: Any) -> int:
    """Audit the WALs, and write a page with the results.

    The page contains the verdict and the figures of all WALs. It is one self-contained file. Exit
    code 5 means a violation or a coverage below --require-coverage. Exit code 1 means that there
    was nothing to audit.
    """
    if not out.absolute().parent.is_dir():
        raise BadPath(str(out), "is in a directory that does not exist")
    from purgatoryd.pipeline import report
    from purgatoryd.pipeline.audit import audit
    from purgatoryd.pipeline.figures import figures
    from purgatoryd.pipeline.silver import received

    with _read(**options) as read:
        verdict = audit(*read.whole, read.ledger)
        bronze, ledgers = read.whole.bronze, options["ledger"]
        found = figures(bronze, received(bronze.sparkSession, ledgers) if ledgers else None)
    out.write_text(report.page(verdict, found, datetime.now(UTC)))
    _show(verdict, as_json)
    if not as_json:
        _print_tables(verdict, found.parts)
    emit({"page": str(out)}, f"wrote {out}", as_json)
    return _exit(verdict, required)


def _print_tables(verdict: Verdict, parts: list[Profile]) -> None:
    from rich.console import Console

    from purgatoryd.pipeline.report import WIDE, key_tables

    Console(highlight=False, soft_wrap=True, width=WIDE).print(key_tables(verdict, parts))
