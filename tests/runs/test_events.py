"""TensorBoard's event files, read back with a protocol-buffer parser and a checksum that are not ours."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import Trainer
from tensorboardX.proto.event_pb2 import Event

from modelmix.errors import ModelMixError
from modelmix.runs import events
from modelmix.runs.events import EventFile, event, masked_crc, record


def crc32c(data: bytes) -> int:
    """Bit by bit, from the definition (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (crc >> 15 | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8 & 0xFFFFFFFF


def read(path: Path) -> list[Event]:
    """Every record of a file, with its checksums checked; nothing may be left over."""
    data, out = path.read_bytes(), []
    while data:
        length, crc = struct.unpack("<QI", data[:12])
        assert crc == masked(data[:8])
        payload = data[12 : 12 + length]
        assert len(payload) == length
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked(payload),)
        out.append(Event.FromString(payload))
        data = data[16 + length :]
    return out


def scalars(path: Path) -> list[tuple[int, dict[str, float]]]:
    first, *rest = read(path)
    assert first.file_version == "brain.Event:2"
    return [(one.step, {value.tag: value.simple_value for value in one.summary.value}) for one in rest]


def row(step: int, **values: float | None) -> dict:
    return {"step": step, "seconds": 0.5 * step, **values}


def single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"123456789", 0xE3069283), (b"", 0), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_the_checksum_on_published_vectors(data, crc):
    assert crc32c(data) == crc  # the judge
    assert masked_crc(data) == masked(data)


@given(st.binary(max_size=300))
def test_a_record_is_length_payload_and_their_checksums(payload):
    data = record(payload)
    assert data[12:-4] == payload
    assert struct.unpack("<QI", data[:12]) == (len(payload), masked(data[:8]))
    assert struct.unpack("<I", data[-4:]) == (masked(payload),)


@given(
    st.integers(0, 2**62),
    st.dictionaries(st.text(min_size=1, max_size=200), st.floats(width=32, allow_nan=False), max_size=9),
    st.floats(0, 1e12),
)
def test_an_event_is_what_a_parser_reads(step, values, wall_time):
    found = Event.FromString(event(step, values, wall_time))
    assert (found.step, found.wall_time) == (step, wall_time)
    assert {value.tag: value.simple_value for value in found.summary.value} == values


def test_rows_in_order_without_what_is_missing(tmp_path):
    before = time.time()
    file = EventFile(tmp_path / "events", [row(1, loss=1.5, accuracy=None), row(2, loss=0.25)])
    file.add(row(3, loss=0.1, epsilon=math.inf))
    assert scalars(file.path) == [
        (1, {"seconds": 0.5, "loss": 1.5}),
        (2, {"seconds": 1.0, "loss": 0.25}),
        (3, {"seconds": 1.5, "loss": single(0.1), "epsilon": math.inf}),
    ]
    _, first, second, third = (one.wall_time for one in read(file.path))
    assert second - first == pytest.approx(0.5, abs=1e-5)  # the training seconds between them
    assert before - 5.1 <= second <= third <= time.time() + 5


def test_no_exact_time_is_written(tmp_path, monkeypatch):
    """Also not in the header or the name: the first row is written when the first steps are over."""
    monkeypatch.setattr(time, "time", lambda: 1795035171.3086703)
    files = [EventFile(tmp_path / str(i), [row(1, loss=1.5)]) for i in range(2)]
    files[0].add(row(2, loss=0.5))
    assert [one.wall_time for one in read(files[0].path)] == [1795035170.0] * 3
    assert files[0].path.name.startswith("events.out.tfevents.1795035170.")
    assert files[0].path.name != files[1].path.name


def test_numbers_past_single_precision_are_infinite(tmp_path):
    file = EventFile(tmp_path, [row(1, big=1e300, small=-1e300, tiny=1e-300)])
    ((_, found),) = scalars(file.path)
    assert (found["big"], found["small"], found["tiny"]) == (math.inf, -math.inf, 0.0)


def test_a_new_file_takes_the_place_of_the_old(tmp_path):
    old = EventFile(tmp_path, [row(1, loss=2.0)])
    old.path.write_bytes(old.path.read_bytes() + b"half a rec")  # as a killed process may leave it
    new = EventFile(tmp_path, [row(1, loss=2.0), row(2, loss=1.0)])
    assert list(tmp_path.iterdir()) == [new.path]
    assert [step for step, _ in scalars(new.path)] == [1, 2]


@pytest.mark.parametrize("how", ["error", "short"])
def test_a_row_is_appended_whole_or_not_at_all(tmp_path, monkeypatch, how):
    file = EventFile(tmp_path, [row(1, loss=2.0)])
    before = file.path.read_bytes()

    class Full:
        def __init__(self, path: Path, mode: str, **options: int) -> None:
            self._file = open(path, mode, **options)  # noqa: SIM115

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            count = self._file.write(data[:7])
            assert file.path.stat().st_size == len(before) + 7
            if how == "error":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return count

    with monkeypatch.context() as patch:
        patch.setattr(events, "open", Full, raising=False)
        with pytest.raises(ModelMixError, match=r"cannot write .*: No space left on device\."):
            file.add(row(2, loss=1.0))
    assert file.path.read_bytes() == before
    file.add(row(2, loss=1.0))
    assert [step for step, _ in scalars(file.path)] == [1, 2]


def test_the_events_of_a_run_are_its_metrics(tmp_path):
    """Also of a run that was resumed: one file, no point missing or double."""
    import torch
    from torch import nn

    import modelmix as mm

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 4, generator=generator), torch.randint(3, (50,), generator=generator)

    def make(**options: object) -> mm.Trainer:
        torch.manual_seed(0)
        return Trainer(
            nn.Linear(4, 3), nn.CrossEntropyLoss(), (x, y), mm.Mechanism(1.0, 0.3, 2.0), 1.0, 0.3,
            test_set=(x, y), ema=0.9, folder=tmp_path, **options,
        )  # fmt: skip

    def agree() -> None:
        (file,) = (tmp_path / "events").iterdir()
        rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
        assert scalars(file) == [(r["step"], {k: single(v) for k, v in r.items() if k != "step"}) for r in rows]

    one = make().run(4, evaluate_every=2)
    agree()
    one.run(2, evaluate_every=1)
    agree()
    make(resume=True).run(2, evaluate_every=1)
    agree()
    assert [r["step"] for r in json.loads((tmp_path / "metrics.json").read_text())["rows"]] == [2, 4, 5, 6, 7, 8]
    assert {
        "lr",
        "epsilon_if_stopping_was_fixed_beforehand",
        "test_accuracy",
        "test_loss",
        "ema_accuracy",
        "seconds",
    } <= set(scalars(next((tmp_path / "events").iterdir()))[0][1])
