"""The command pipeline bulk-load-agent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.following import follow as repeat
from purgatoryd.cli.options import emit, json_option, name_option

if TYPE_CHECKING:
    from purgatoryd.pipeline.agent import Delivered


@click.command("bulk-load-agent", cls=Command)
@click.argument("spool", type=click.Path(exists=True, file_okay=False, path_type=Path))
@name_option
@click.option(
    "--credits", "credit_rows", type=units.Whole(1, 10**7), default=65_536, show_default=True,
    help="Maximum number of sent rows that are not answered yet.",
)  # fmt: skip
@click.option(
    "--put",
    type=click.Choice(["error", "replace", "keep", "extend"]),
    default="error",
    show_default=True,
    help="If a key is armed: refuse, replace the timer, keep it, or move it to a later time.",
)
@click.option(
    "--follow", type=units.Duration(units.PAUSE_NS),
    help="Keep running and look for files at this interval.",
)  # fmt: skip
@json_option
def bulk_load_agent_command(
    spool: Path, name: str, credit_rows: int, put: str, follow: int | None, as_json: bool
) -> int:
    """Add the timers in files of SPOOL/NAME to the daemon.

    Each row is added only once. df.write.format("purgatoryd").option("to", "files") writes the
    files. The agent runs on the daemon's host. It moves an added file to SPOOL/NAME/done, with the
    answers next to it, and a file that cannot be read or added to SPOOL/NAME/refused, with the
    reason. Exit code 4 means that rows were refused, 5 that a file was refused.
    """
    from purgatoryd.pipeline.extras import need

    need("pyarrow", "lake")
    from purgatoryd.pipeline.agent import deliver
    from purgatoryd.pipeline.bulk_loading import BulkLoader

    def round_() -> Exit:
        code = Exit.DONE
        with BulkLoader(name, mode=put) as loader:
            for one in deliver(spool, loader, credit_rows):
                emit({"file": one.path.name, "left": one.left, "bad": one.bad,
                      **one.answers.record()}, summary(one), as_json)  # fmt: skip
                code = max(code, code_of(one))
        return code

    if follow is None:
        return round_()
    pause_s = follow / 1e9
    repeat(round_, lambda: pause_s, as_json)
    return Exit.DONE


def code_of(one: Delivered) -> Exit:
    """Return the exit code for a delivered file."""
    if one.bad:
        return Exit.BROKEN
    return Exit.REFUSED if one.answers.refused else Exit.DONE


def summary(one: Delivered) -> str:
    """Return the result for a file as text."""
    counts = ", ".join(
        f"{n} {subject.lower()}" for subject, n in sorted(one.answers.counts.items())
    )
    if one.bad:
        return f"{one.path.name}: moved to refused, {one.bad}" + (
            f"; before that {counts}" if counts else ""
        )
    return f"{one.path.name}: {counts}" + (
        "; the file stays for the next attempt" if one.left else ""
    )
