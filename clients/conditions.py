"""Conditions of an operation: classes for callers, and their encoding.

`own` lists those keys of a condition that no other operation uses. The daemon forgets these keys
when the operation ends, as forget() would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from purgatoryd.clients.arguments import check_whole
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import InvalidCondition
from purgatoryd.shm_layout.layout import TARGET_MAX, WATCH_KEYS_MAX, WATERMARK_MAX, Condition
from purgatoryd.shm_layout.wire import Key

T = TypeVar("T")
ByKey = Mapping[str, T] | Mapping[bytes, T] | Mapping[UUID, T] | Mapping[Key, T]
"""A value for each key. The union lists all key types: Mapping is invariant in its key type."""

_NOW = 2**64 - 1  # as a base of SUM: the watermark of the key when the operation is armed


@dataclass(frozen=True, slots=True)
class AllOf:
    """Holds once every key's watermark is at least its target. `targets`: 1 to 1024 keys.

    The condition fails when a key fails before it has reached its target.
    """

    targets: ByKey[int]
    own: Collection[Key] = ()


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Holds once at least one key's watermark is at least its target. `targets`: 1 to 1024 keys.

    The condition fails when all its keys have failed.
    """

    targets: ByKey[int]
    own: Collection[Key] = ()


@dataclass(frozen=True, slots=True)
class Quorum:
    """Holds once the watermarks of at least `need` keys are at least their targets.

    The condition has n keys. It fails when more than n - `need` of them have failed before they
    reached their targets. `targets`: 1 to 1024 keys with their targets, or a collection of keys
    with the target 1; `need`: 1 to n. Raises InvalidCondition if `need` or the number of keys is
    out of bounds.
    """

    targets: ByKey[int] | Collection[Key]
    need: int
    own: Collection[Key] = ()

    def __post_init__(self) -> None:
        _quorum_keys(self)


@dataclass(frozen=True, slots=True)
class SumOf:
    """Holds once the gains of all keys add up to `at_least`.

    The gain of a key is its watermark minus its base, and at most `cap`. `bases`: 1 to 1024 keys
    with their bases; None = the key's watermark when the operation is armed. `cap`: one cap for all
    keys, or a cap for each key; None = no cap.
    """

    bases: ByKey[int | None]
    at_least: int
    cap: int | ByKey[int] | None = None
    own: Collection[Key] = ()


@dataclass(frozen=True, slots=True)
class When:
    """Holds once `condition()` is true. The owner's process calls it whenever one of `keys`
    advances.

    `condition()` runs in the Purgatory's own thread, and should be quick. An exception is logged
    and counts as false.
    """

    condition: Callable[[], object]
    keys: Collection[Key]
    own: Collection[Key] = ()


AnyCondition = AllOf | AnyOf | Quorum | SumOf | When


class Encoded(NamedTuple):
    """The record fields of a condition, and its watch keys: encoded (`watched`), and in the same
    order as `keys`."""

    kind: Condition
    threshold: int
    watched: bytes
    keys: tuple[Key, ...]


def encode(condition: AnyCondition) -> Encoded:
    """Encode a condition. Raises InvalidCondition and InvalidKey; both errors name the limit."""
    if isinstance(condition, When):
        return _encode_when(condition)
    if isinstance(condition, SumOf):
        return _encode_sum(condition)
    if isinstance(condition, Quorum):
        return _encode_quorum(condition)
    if not isinstance(condition, AllOf | AnyOf):
        raise InvalidCondition("must be AllOf, AnyOf, Quorum, SumOf or When", condition)
    kind = Condition.ALL if isinstance(condition, AllOf) else Condition.ANY
    targets = _mapping(condition.targets)
    return _encoded(kind, 0, tuple(targets), _check_targets(targets), condition.own)


def _encode_quorum(condition: Quorum) -> Encoded:
    keys, given = _quorum_keys(condition), condition.targets
    targets = _check_targets(given) if isinstance(given, Mapping) else [1] * len(keys)
    return _encoded(Condition.QUORUM, condition.need, keys, targets, condition.own)


def _quorum_keys(condition: Quorum) -> tuple[Key, ...]:
    """Return the keys, of which there must be at least `need`."""
    need, keys = condition.need, _check_count(_collection("targets", condition.targets))
    if isinstance(need, bool) or not isinstance(need, int) or not 1 <= need <= len(keys):
        raise InvalidCondition(
            f"need must be an int from 1 to {len(keys)}, the number of keys", need
        )
    return keys


def _encode_when(condition: When) -> Encoded:
    if not callable(condition.condition):
        raise InvalidCondition("must be callable", condition.condition)
    keys = _collection("keys", condition.keys)
    return _encoded(Condition.CLIENT, 0, keys, [0] * len(keys), condition.own)


def _collection(name: str, given: Collection[Key]) -> tuple[Key, ...]:
    if isinstance(given, str | bytes):  # a collection, but not of keys
        raise InvalidCondition(f"{name} must be a collection of keys", given)
    try:
        return tuple(given)
    except TypeError:
        raise InvalidCondition(f"{name} must be a collection of keys", given) from None


def _mapping(given: object) -> Mapping[Key, Any]:
    if not isinstance(given, Mapping):
        raise InvalidCondition("must be a mapping from keys", given)
    return given


def check_watermark(value: object) -> int:
    """Return a watermark as an int. Raises InvalidArgument."""
    return check_whole("watermark", value, 0, WATERMARK_MAX)


def _whole(name: str, value: object, most: int = WATERMARK_MAX) -> int:
    """Return a target, base, cap or sum as an int. Raises InvalidCondition."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InvalidCondition(f"a {name} must be an int from 0 to {most}", value)
    return value


def check_target(value: object) -> int:
    """Return a target as an int. Raises InvalidCondition."""
    return _whole("target", value, TARGET_MAX)


def _check_targets(targets: Mapping[Any, object]) -> list[int]:
    return [check_target(target) for target in targets.values()]


def _encode_sum(condition: SumOf) -> Encoded:
    given = _mapping(condition.bases)
    keys = tuple(given)
    bases = [_NOW if b is None else _whole("base", b) for b in given.values()]
    threshold, caps = _whole("sum", condition.at_least), _caps(condition, keys)
    return _encoded(Condition.SUM, threshold, keys, bases, condition.own, caps)


def _caps(condition: SumOf, keys: tuple[Key, ...]) -> list[int]:
    if condition.cap is None:
        return [WATERMARK_MAX] * len(keys)
    if not isinstance(condition.cap, Mapping):
        return [_whole("cap", condition.cap)] * len(keys)
    cap = _mapping(condition.cap)
    if missing := [key for key in keys if key not in cap]:
        raise InvalidCondition("every key needs a cap", missing[0])
    return [_whole("cap", cap[key]) for key in keys]


def _encoded(
    kind: Condition, threshold: int, keys: tuple[Key, ...], targets: list[int],
    own: Collection[Key], caps: list[int] | None = None,
) -> Encoded:  # fmt: skip
    caps, owned = caps or [0] * len(_check_count(keys)), _owned(keys, own)
    watched = map(wire.encode_watch_key, keys, targets, caps, owned)
    return Encoded(kind, threshold, b"".join(watched), keys)


def _check_count(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    if not 1 <= len(keys) <= WATCH_KEYS_MAX:
        raise InvalidCondition(f"1 to {WATCH_KEYS_MAX} keys are allowed", len(keys))
    return keys


def _owned(keys: tuple[Key, ...], own: Collection[Key]) -> list[bool]:
    """Return for each key whether it is in `own`."""
    if not own:
        return [False] * len(keys)
    encoded = [wire.encode_key(key) for key in keys]
    wanted = {wire.encode_key(key): key for key in _collection("own", own)}
    if strangers := wanted.keys() - set(encoded):
        raise InvalidCondition("an own key must be one of the keys", wanted[strangers.pop()])
    return [key in wanted for key in encoded]
