"""The exponent of the scale bench."""

from __future__ import annotations

import pytest
import scale


@pytest.mark.parametrize(
    ("points", "found"),
    [
        ({n: 0.01 * n**1.5 for n in (8, 64, 512)}, 1.5),
        # as its two ends: the middle has no part where the sizes stand evenly
        ({8: 0.01, 64: 1.0, 512: 0.64}, 1.0),
        ({8: 0.01, 64: 0.02, 128: 0.64, 512: 0.64}, 1.11),  # above that of its two ends, which is 1
        ({8: 1e-7, 64: 1e-6, 512: 1e-5}, 0.0),  # below what counts
        ({8: 0.4, 64: 0.2, 512: 0.1}, 0.0),
    ],
)
def test_an_exponent_is_fitted_to_all_sizes(points: dict[int, float], found: float) -> None:
    assert scale.exponent(points) == found
