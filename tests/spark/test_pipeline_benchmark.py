"""The benchmark of the pipeline runs; its figures are not judged."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parents[2]


def test_every_step_of_the_benchmark_of_the_pipeline_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the steps of `--quick` in this Spark session, and the baselines in this process. Memory
    is not judged, so no process has to be separate."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # the steps set this variable for their daemons
    monkeypatch.setenv("PURGATORYD_DIR", str(tmp_path))
    bench = import_module("bench_pipeline")
    work = bench.baseline.WORK
    monkeypatch.setattr(bench.baseline, "apart", lambda detail, *of: work[detail](*map(str, of)))
    arguments = bench.parse(["--quick", "--directory", str(tmp_path)])
    with bench.working(arguments):
        jobs = [bench.run_here(arguments, job, lambda: spark) for job in bench.steps.JOBS]
    run = bench.together(jobs)
    found = bench.document(arguments, 1, [run])
    rates = {step: of for step, of in run.items() if "warm" in of}
    assert set(rates) == set(bench.baseline.NAMES)
    assert all({"cold", "warm", "baseline", "peak_bytes"} <= of.keys() for of in rates.values())
    assert all(value > 0 for of in rates.values() for value in of.values())
    assert {line.split(" | ")[0] for line in bench.table(found).splitlines()} >= {
        f"| {step}" for step in rates
    }
