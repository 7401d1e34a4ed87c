"""Spans: every call of every hook with its time, and the total time of each plugin.

Spans measure the host. A hook that starts work on the device is short; one that waits is long.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from eventloop import Clock


class Span(NamedTuple):
    """One call of one implementation; a wrapper's span includes the spans of the calls it wraps.

    Args:
        start_ns, duration_ns: by the host's clock, from the beginning of the trace.
    """

    plugin: str
    hook: str
    start_ns: int
    duration_ns: int
    epoch: int
    batch: int


@dataclass
class Share:
    """The time of one plugin's implementation of one hook.

    Args:
        own_ns: without the spans inside its own.
    """

    plugin: str
    hook: str
    calls: int = 0
    own_ns: int = 0


class Spans:
    """The spans of a run, and the time of each implementation.

    Args:
        max_spans: how many are kept for the file, which is slow to open in any viewer where it has
            more than a million; the table counts all.

    Attributes:
        first: the first `max_spans` spans.
        num_left_out: how many weren't kept.
    """

    columns = ("plugin", "hook", "calls", "ms a call", "ms a batch", "s", "share")

    def __init__(self, max_spans: int) -> None:
        self.first: list[Span] = []
        self.num_left_out = 0
        self._max_spans = max_spans
        self._began_ns = time.perf_counter_ns()
        self._shares: dict[tuple[str, str], Share] = {}
        self._enclosed_ns: list[int] = [0]
        self._batches = (0, 0)

    @contextmanager
    def taken(self, plugin: str, hook: str, clock: Clock) -> Iterator[None]:
        """Measures the time of the block."""
        epoch = clock.epoch
        batch = clock.batch
        if not self._shares:
            self._batches = (batch, batch)
        self._enclosed_ns.append(0)
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            duration_ns = time.perf_counter_ns() - start_ns
            own_ns = duration_ns - self._enclosed_ns.pop()
            self._enclosed_ns[-1] += duration_ns
            share = self._shares.setdefault((plugin, hook), Share(plugin, hook))
            share.calls += 1
            share.own_ns += own_ns
            self._batches = (self._batches[0], clock.batch)
            if len(self.first) < self._max_spans:
                from_ns = start_ns - self._began_ns
                self.first.append(Span(plugin, hook, from_ns, duration_ns, epoch, batch))
            else:
                self.num_left_out += 1

    def shares(self) -> list[Share]:
        """Returns the time of each implementation, the longest first."""
        return sorted(
            self._shares.values(), key=lambda share: (-share.own_ns, share.plugin, share.hook)
        )

    def rows(self) -> Iterator[Sequence[str]]:
        """Yields the table's rows; the shares of all rows add up to the run so far.

        Implementations below a thousandth of the run are summed in one row.
        """
        whole_ns = time.perf_counter_ns() - self._began_ns
        outside_ns = whole_ns - self._enclosed_ns[0]
        num_batches = max(self._batches[1] - self._batches[0], 1)
        shares = self.shares()
        small = [share for share in shares if share.own_ns < whole_ns / 1000]
        if len(small) > 1:
            calls = sum(share.calls for share in small)
            own_ns = sum(share.own_ns for share in small)
            others = Share("", f"{len(small)} others, below 0.1 % each", calls, own_ns)
            shares = [*shares[: len(shares) - len(small)], others]
        for share in [*shares, Share("", "outside of hooks", 0, outside_ns)]:
            yield (
                share.plugin,
                share.hook,
                str(share.calls) if share.calls else "",
                f"{share.own_ns / share.calls / 1e6:.3f}" if share.calls else "",
                f"{share.own_ns / num_batches / 1e6:.3f}",
                f"{share.own_ns / 1e9:.3f}",
                f"{share.own_ns / whole_ns:.1%}",
            )

    def write(self, path: Path, rank: int) -> None:
        """Writes the spans in the Trace Event Format, which Perfetto and chrome://tracing read.

        Source: Trace Event Format, Google, section "Complete Events".
        """
        thread = {"pid": os.getpid(), "tid": threading.get_native_id()}
        name = {"name": f"eventloop, rank {rank}"}
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(json.dumps({"ph": "M", "name": "process_name", **thread, "args": name}))
            for span in sorted(self.first, key=lambda span: (span.start_ns, -span.duration_ns)):
                file.write(",\n" + json.dumps(_event(span) | thread))
            file.write("\n]}\n")


def _event(span: Span) -> dict[str, Any]:
    """Makes the complete event of a span; times in µs, to the ns."""
    return {
        "ph": "X",
        "name": f"{span.plugin} {span.hook}",
        "cat": span.plugin,
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
        "args": {
            "plugin": span.plugin,
            "hook": span.hook,
            "epoch": span.epoch,
            "batch": span.batch,
        },
    }
