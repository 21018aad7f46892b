"""How many samples are held at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmix.training import Performance
from modelmix.training.performance import _CHUNK_BYTES


class OnGpu(Performance):
    def find_device(self) -> torch.device:
        return torch.device("cuda")


@given(
    st.floats(0.01, 1e6, allow_nan=False),
    st.integers(1, 10**9),
    st.integers(1, 64),
    st.sampled_from((OnGpu, Performance)),
)
def test_a_chunk_fits_and_is_never_empty(batch, coordinates, copies, kind):
    chunk = (kind() if kind is OnGpu else kind(device="cpu")).chunk_for(batch, coordinates, copies)
    room = _CHUNK_BYTES["cuda" if kind is OnGpu else "cpu"]
    assert chunk >= 1
    assert chunk == 1 or 4 * chunk * coordinates <= room
    assert chunk * copies <= max(4096, 32 * copies)


@pytest.mark.parametrize(
    ("batch", "coordinates", "chunks"), [(1500, 268_346, 1), (4096, 2_700_000, 22), (50_000, 12_010, 25)]
)
def test_an_accelerator_gets_few_chunks_with_little_padding(batch, coordinates, chunks):
    size = OnGpu().chunk_for(batch, coordinates, 1)
    assert size % 32 == 0
    assert chunks * size >= batch + 2 * math.sqrt(batch)
    assert (chunks - 1) * size < batch
    assert chunks * size < 1.1 * batch


def test_a_chunk_that_is_asked_for_is_taken():
    assert OnGpu(chunk=7).chunk_for(1500, 268_346, 1) == 7
