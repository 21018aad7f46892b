"""The idx format: what is written is read, and a file that is not whole is refused in one line."""

from __future__ import annotations

import gzip
import lzma
import struct

import numpy as np
import pytest

from modelmix.data import idx
from modelmix.errors import ModelMixError

ARRAY = np.random.default_rng(0).integers(0, 256, (3, 5, 7), dtype=np.uint8)
HEADER = bytes([0, 0, 8, 3]) + struct.pack(">3I", 3, 5, 7)
ENDINGS = ["", ".gz", ".xz"]


def refused(path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelMixError) as error:
        idx.read(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("array", [ARRAY, ARRAY[0, 0], ARRAY[:, None], ARRAY.transpose(0, 2, 1)], ids=lambda a: a.ndim)
def test_what_is_written_is_read(tmp_path, ending, array):
    path = tmp_path / f"array{ending}"
    idx.write(path, array)
    found = idx.read(path)
    assert found.dtype == np.uint8
    assert found.flags.writeable
    np.testing.assert_array_equal(found, array)


def test_the_bytes_are_those_of_the_format(tmp_path):
    idx.write(tmp_path / "plain", ARRAY)
    assert (tmp_path / "plain").read_bytes() == HEADER + ARRAY.tobytes()


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_same_array_gives_the_same_bytes(tmp_path, ending):
    for name in ("one", "two"):
        idx.write(tmp_path / f"{name}{ending}", ARRAY)
    assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"two{ending}").read_bytes()


def test_the_packing_is_seen_from_the_bytes(tmp_path):
    (tmp_path / "misnamed.gz").write_bytes(lzma.compress(HEADER + ARRAY.tobytes()))
    np.testing.assert_array_equal(idx.read(tmp_path / "misnamed.gz"), ARRAY)


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_cut_is_refused(tmp_path, ending):
    path = tmp_path / f"array{ending}"
    idx.write(path, ARRAY)
    whole = path.read_bytes()
    messages = [refused(path, whole[:length]) for length in range(len(whole))]
    # The first few bytes of a packed file do not yet say that it is one.
    assert all("is cut off: " in message for message in messages[6:])


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_every_flipped_byte_of_a_packed_file_is_refused_or_harmless(tmp_path, ending):
    path = tmp_path / f"array{ending}"
    idx.write(path, ARRAY)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            np.testing.assert_array_equal(idx.read(path), ARRAY)
        except ModelMixError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "is not an idx file of unsigned bytes: it begins with 89 50 4e 47"),
        (bytes([0, 0, 13, 1]) + struct.pack(">I", 1) + bytes(4), "is not an idx file of unsigned bytes"),
        (bytes([0, 0, 8, 0]), "a number of axes from 1 to 4"),
        (bytes([0, 0, 8, 200]) + bytes(800), "a number of axes from 1 to 4"),
        (bytes([0, 0, 8, 2]) + struct.pack(">2I", 0, 7), "is empty"),
        (bytes([0, 0, 8, 4]) + b"\xff" * 16 + bytes(5), "is cut off"),
        (HEADER + ARRAY.tobytes() + b"!", "is too long: shape 3x5x7 needs 105 bytes of data, it holds 106"),
        (HEADER + ARRAY.tobytes()[:-1], "is cut off: shape 3x5x7 needs 105 bytes of data, it holds 104"),
        (gzip.compress(HEADER + ARRAY.tobytes()[:-1]), "is cut off: shape 3x5x7"),
    ],
)
def test_what_is_no_idx_file_is_refused(tmp_path, data, reason):
    assert reason in refused(tmp_path / "file", data)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelMixError, match="cannot be read: No such file"):
        idx.read(tmp_path / "nothing")


@pytest.mark.parametrize("array", [ARRAY.astype(np.int64), ARRAY[0, 0, 0], ARRAY[:0], ARRAY[None, None]])
def test_what_the_format_cannot_hold_is_not_written(tmp_path, array):
    with pytest.raises(ModelMixError, match="cannot be written"):
        idx.write(tmp_path / "file", np.asarray(array))
    assert not (tmp_path / "file").exists()
