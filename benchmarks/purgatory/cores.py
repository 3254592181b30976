"""One interface for all designs: they take messages and return outcomes.

A message starts at the beginning of `Messages.bytes`, a message of outcomes at the beginning of
`out`.
"""

from __future__ import annotations

import mmap
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cffi import FFI

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout._core import ffi, lib

from .experiment import Experiment, Figures, Schedule
from .messages import FRAME, OUTCOME, OUTCOME_AREA, Bytes, Messages, statuses_in
from .through import Through

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent
LIBRARY = ROOT / "build" / "libbaseline.so"
FLAGS = ["-std=gnu11", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra"]
OUT_BYTES = 1 << 20
OUTCOMES = 512
"""Maximum number of outcomes in one message, as in the core."""

DONE = (lib.PG_ST_ADDED, lib.PG_ST_DONE)
"""The statuses of records that were applied."""

REFUSALS = tuple(name for name, *_ in layout.fields("pg_metrics") if "refused" in name)
"""The names of the counters of refused records and batches."""

DECLARATIONS = """
struct baseline_figures { uint64_t pending, bytes, bytes_max, purges;
                          int64_t purge_ns, purge_max_ns; };
void *baseline_make(int is_new, int64_t now_ns);
void baseline_handle(void *b, const void *message);
void baseline_advance(void *b, int64_t now_ns);
uint64_t baseline_inbox(void *b, void *out, uint32_t most);
void baseline_figures(const void *b, struct baseline_figures *figures);
"""


class Refused(Exception):
    """A design has no free slot for a request, so it does not keep up."""


class Core(Protocol):
    """One design."""

    out: Bytes

    def handle(self, length: int) -> None:
        """Handle the message of `length` bytes."""

    def advance(self, now_ns: int) -> None:
        """Expire operations that are due."""

    def inbox(self) -> int:
        """Return the size of the next OUTCOMES message in `out`; 0 = none."""

    def figures(self) -> Figures:
        """Return the figures of the run about memory and purges."""


def pointer(array: Bytes) -> Any:
    """Return the address of an array. The caller must keep the array alive."""
    return ffi.cast("uint8_t *", array.ctypes.data)


# ---- nothing -----------------------------------------------------------------------------


class Nothing:
    """A design that does nothing, to measure the driver alone. It returns the predicted
    outcomes."""

    def __init__(self, schedule: Schedule, start_ns: int) -> None:
        self.out = np.zeros(OUT_BYTES, np.uint8)
        ends_ns = schedule.ends_ns + start_ns
        order = np.argsort(ends_ns)
        self._ends_ns = ends_ns[order]
        self._requests = order.astype(np.uint64)
        self._causes = np.where(
            schedule.ends_ns == schedule.completes_ns, lib.PG_CAUSE_SATISFIED, lib.PG_CAUSE_EXPIRED
        )[order].astype(np.uint64)
        self._next = self._due = 0

    def handle(self, length: int) -> None: ...

    def advance(self, now_ns: int) -> None:
        self._due = int(np.searchsorted(self._ends_ns, now_ns, side="right"))

    def inbox(self) -> int:
        first, end = self._next, min(self._next + OUTCOMES, self._due)
        count = end - first
        if count == 0:
            return 0
        self._next = end
        self.out[24:28] = np.frombuffer(count.to_bytes(4, "little"), np.uint8)
        at = FRAME + count * OUTCOME.itemsize
        heads = np.ndarray(count, OUTCOME, self.out, FRAME)
        areas = np.ndarray(count, OUTCOME_AREA, self.out, at)
        heads["ticket"] = self._causes[first:end]
        areas["key"] = self._requests[first:end]
        return at + count * OUTCOME_AREA.itemsize

    def figures(self) -> Figures:
        return Figures()


# ---- old and new -------------------------------------------------------------------------


def build() -> None:
    """Compile the two earlier designs into one library."""
    LIBRARY.parent.mkdir(exist_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    include = f"-I{ROOT / 'shm_layout'}"
    subprocess.run([*compiler, *FLAGS, include, "-o", str(LIBRARY), *sources], check=True)


class Baseline:
    """One of the two earlier designs, `old` or `new`."""

    def __init__(self, design: str, messages: Messages, now_ns: int) -> None:
        self._ffi: Any = FFI()
        self._ffi.cdef(DECLARATIONS)
        library: Any = self._ffi.dlopen(str(LIBRARY))
        self._lib = library
        self._b = library.baseline_make(design == "new", now_ns)
        self.out = np.zeros(OUT_BYTES, np.uint8)
        self._out = self._ffi.cast("void *", self.out.ctypes.data)
        self._in = self._ffi.cast("void *", messages.bytes.ctypes.data)

    def handle(self, length: int) -> None:
        self._lib.baseline_handle(self._b, self._in)

    def advance(self, now_ns: int) -> None:
        self._lib.baseline_advance(self._b, now_ns)

    def inbox(self) -> int:
        return int(self._lib.baseline_inbox(self._b, self._out, OUTCOMES))

    def figures(self) -> Figures:
        f: Any = self._ffi.new("struct baseline_figures *")
        self._lib.baseline_figures(self._b, f)
        return Figures(f.bytes_max, f.purges, f.purge_ns, f.purge_max_ns)


# ---- ours, in private memory -------------------------------------------------------------


def sizes(experiment: Experiment) -> dict[str, int]:
    """Return the size settings of an arena with space for all requests that arrive in 330 ms."""
    slots = max(1 << 14, int(experiment.rate * 0.33))
    keys = experiment.own * slots + experiment.shared + 1
    return {
        "capacity": slots,
        "watches": slots * (experiment.own + experiment.shared),
        "watermarks": keys,
        "payload_bytes": slots * 216 + (1 << 20),
        "replay_capacity": 1024,
        "replay_bytes_max": 1 << 20,
        "inbox_max": slots,
        "namespaces": 2,
        "topics": 2,
        "sessions": 2,
        "watermark_ttl_ns": 600 * 10**9,
        "tick_ns": 1_000_000,
        "fanout": 256,
        "stream_id": 1,
        "page_size": mmap.PAGESIZE,
        "layout_id": layout.LAYOUT_ID,
    }


def private_memory(size: int) -> Bytes:
    """Return zeroed private memory, in huge pages if the kernel has huge pages."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    pages[:: mmap.PAGESIZE] = 0  # allocate all pages before the first request
    return pages


class Ours:
    """The core in private memory, through the functions that the daemon calls."""

    def __init__(self, experiment: Experiment, messages: Messages, now_ns: int) -> None:
        self.out = np.zeros(OUT_BYTES, np.uint8)
        self._reply = np.zeros(1 << 20, np.uint8)
        self._messages, self._shared = messages, experiment.shared
        self._create(ffi.new("struct pg_config *", {**sizes(experiment), "now_ns": now_ns}))
        self._in, self._out = pointer(messages.bytes), pointer(self.out)
        self._to = pointer(self._reply)
        self._reply_bytes, self._wait_ns = ffi.new("uint64_t *"), ffi.new("int64_t *")
        self._session, self._more = ffi.new("uint64_t *"), ffi.new("int *")
        self._now_ns = now_ns
        lib.pg_handle(
            self._a, self._in, messages.hello(os.urandom(16)), 0, 0, now_ns, now_ns,
            self._to, self._reply_bytes, self._wait_ns,
        )  # fmt: skip
        messages.session = wire.decode_reply(self._reply[:FRAME].tobytes()).session

    def _create(self, config: Any) -> None:
        bytes_of = (lib.pg_arena_bytes(config), lib.pg_private_bytes(config))
        self._mapped = [private_memory(size) for size in bytes_of]
        self._memory = ffi.new("uint8_t[]", lib.pg_handle_bytes())
        self._a = ffi.cast("struct pg_arena *", self._memory)
        if 0 in bytes_of or not lib.pg_create(self._a, *map(pointer, self._mapped), config):
            raise SystemExit(f"the arena cannot be created: {bytes_of} bytes")
        self._metrics = lib.pg_metrics_of(self._a)

    def handle(self, length: int) -> None:
        handled = lib.PG_H_AGAIN
        while handled == lib.PG_H_AGAIN:
            handled = lib.pg_handle(
                self._a, self._in, length, 0, 0, self._now_ns, self._now_ns, self._to,
                self._reply_bytes, self._wait_ns,
            )  # fmt: skip

    def advance(self, now_ns: int) -> None:
        """Expire operations that are due. Raises Refused if the core refused a record in an earlier
        iteration.

        This method reads the core's counters of refusals, because checking the status of every
        record would take more time. Any other wrong status leads to a wrong outcome, which the
        driver finds.
        """
        if any(getattr(self._metrics, name) for name in REFUSALS):
            raise Refused
        self._now_ns = now_ns
        self._more[0] = 1
        while self._more[0]:
            lib.pg_advance(self._a, now_ns, 0, now_ns, 4096, self._more)

    def inbox(self) -> int:
        return int(lib.pg_inbox(self._a, self._session, self._out, OUT_BYTES))

    def figures(self) -> Figures:
        return Figures(sum(len(array) for array in self._mapped))  # all their pages are resident

    def check(self) -> None:
        """Check every invariant, and that no operation and no own watch key of a request is
        left."""
        fault = ffi.new("struct pg_fault *")
        if not lib.pg_check(self._a, fault):
            raise SystemExit(f"broken: {ffi.string(fault.part)} {ffi.string(fault.detail)}")
        left = self._metrics
        if left.operations or left.outcomes or left.live or left.blob_bytes:
            raise SystemExit("operations, or their bytes, are left at the end")
        regions = lib.pg_header_of(self._a).regions
        pool = ffi.cast(
            "struct pg_purgatory *", pointer(self._mapped[0]) + regions[lib.PG_R_PURGATORY].offset
        )
        retained = regions[lib.PG_R_WATERMARKS].count - pool.free_watermarks
        if retained != self._shared or pool.free_watches != regions[lib.PG_R_WATCHES].count:
            raise SystemExit(f"{retained} watch keys are left at the end")


def check_reply(reply: Bytes) -> None:
    """Raise Refused unless every record of a batch was applied."""
    statuses = statuses_in(reply)
    if sum(map(statuses.count, DONE)) != len(statuses):
        raise Refused(f"statuses {sorted(set(statuses))}")


def make(experiment: Experiment, schedule: Schedule, messages: Messages, start_ns: int) -> Core:
    """Return the design of an experiment whose schedule begins at start_ns."""
    if experiment.design == "nothing":
        return Nothing(schedule, start_ns)
    if experiment.design == "daemon":
        return Through(experiment, messages, check_reply)
    if experiment.design == "ours":
        return Ours(experiment, messages, start_ns)
    return Baseline(experiment.design, messages, start_ns)
