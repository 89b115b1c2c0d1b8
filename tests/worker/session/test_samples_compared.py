"""What workers compare of the samples that each of them reads by itself, when a generation is
entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.data.streams import Stream
from elastic.errors import ProgramError
from elastic.types import Resume
from elastic.types.nouns import Source
from elastic.worker.session.loss_probe import Probe


@pytest.mark.parametrize(("source", "reads"), [("fresh", 1), ("live", 0), ("durable", 0)])
def test_what_a_stream_begins_with_is_compared_where_the_run_begins(
    source: Source, reads: int
) -> None:
    """A survivor has read it hours ago; a new worker's may be another one, and is passed over."""

    class Moving:
        def __iter__(self) -> Iterator[Any]:
            return iter([{"x": torch.zeros(1)}])

        def state_dict(self) -> dict[str, Any]:
            return {}

    read: list[int] = []
    draws = SimpleNamespace(item=lambda dataset, i: read.append(i) or dataset[i])
    stream = Stream(Moving(), 4)
    place: Any = SimpleNamespace(
        dataset=stream, probe_repeats=False, program=None, probes={}, samples_read=[],
        sample_draws=draws,
    )  # fmt: skip
    order: Any = SimpleNamespace(plan=SimpleNamespace(resume=Resume(source), probe=None))

    def other(numbers: torch.Tensor, op: Any) -> None:
        """Another rank's first item differs from this one's, where it is looked at."""
        assert numbers[2:].count_nonzero() == 0 or reads
        numbers[2] += 1.0

    groups: Any = SimpleNamespace(control=SimpleNamespace(all_reduce=other))
    probe = Probe(place, order, groups, stepper=None)
    with pytest.raises(ProgramError, match="first sample of the") if reads else nullcontext():
        assert probe.at_entry(3) is None
    assert len(read) == reads
