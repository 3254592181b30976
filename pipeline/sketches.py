"""KLL sketches: quantiles of what was seen, in parts that merge in any order.

A rank is off by at most `rank_error()`; the least and the greatest value are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

if TYPE_CHECKING:
    from pyspark.sql import Column

K = 400
"""Of the sketches; at most 7 KB each."""


def rank_error() -> float:
    """How far the rank of a quantile may be from the one asked for, 99 times of 100."""
    return float(2.296 / K**0.9723)


def sketch(value: Column, name: str) -> Column:
    """Aggregate: a sketch of a long column; nulls are left out."""
    return F.kll_sketch_agg_bigint(value, F.lit(K)).alias(name)


def merged(name: str) -> Column:
    """Aggregate: the sketches of a column in one."""
    return F.kll_merge_agg_bigint(name, F.lit(K)).alias(name)


def count(name: str) -> Column:
    """How many values a sketch has seen."""
    return F.kll_sketch_get_n_bigint(name)


def quantile(name: str, rank: float) -> Column:
    """The value of that rank, 0 to 1; null of an empty sketch."""
    return F.when(count(name) > 0, F.kll_sketch_get_quantile_bigint(name, F.lit(rank)))
