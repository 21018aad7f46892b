"""Downloads: what arrives under its own name is whole and right, whatever the network, the server and the disk do."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from website import serving

from modelmix.errors import ModelMixError
from modelmix_lab.datasets import catalogue
from modelmix_lab.datasets import fetch as fetching
from modelmix_lab.datasets.catalogue import PublicSet
from modelmix_lab.datasets.checksum import File
from modelmix_lab.datasets.download import RetryPolicy

SIZE = 300_000  # several pieces
CONTENT = {name: np.random.default_rng(seed).bytes(SIZE) for seed, name in enumerate(("one.bin", "two.bin"))}
QUICK = RetryPolicy(timeout=5.0, attempts=3, pause=0.001)


@pytest.fixture
def site():
    with serving() as site:
        site.files = dict(CONTENT)
        yield site


def described(files: dict[str, bytes]) -> tuple[File, ...]:
    return tuple(File(name, f"sha256:{sha256(content).hexdigest()}", len(content)) for name, content in files.items())


@pytest.fixture
def plain(monkeypatch, site):
    """A public set of two files, called "plain"."""
    public = PublicSet("Plain", site.url, "free", "plain-folder", described(CONTENT))
    monkeypatch.setitem(catalogue.CATALOGUE, "plain", public)
    return public


def pack(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def packed(monkeypatch, site):
    """A public set in an archive; call it with the members to publish."""

    def publish(members: list[tuple[tarfile.TarInfo, bytes]]) -> PublicSet:
        site.files = {"set.tar.gz": pack(members)}
        public = PublicSet("Packed", site.url, "free", "inside", described(site.files), described(CONTENT))
        monkeypatch.setitem(catalogue.CATALOGUE, "packed", public)
        return public

    return publish


def sound() -> list[tuple[tarfile.TarInfo, bytes]]:
    return [(tarfile.TarInfo(f"inside/{name}"), content) for name, content in CONTENT.items()]


def fetch(name, folder, **more):
    return fetching.fetch(name, folder, **{"retry": QUICK, **more})


def refused(name, folder, **more) -> str:
    with pytest.raises(ModelMixError) as error:
        fetch(name, folder, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def assert_complete(folder: Path) -> None:
    assert names(folder) == ["plain-folder/one.bin", "plain-folder/two.bin"]
    assert {name: (folder / "plain-folder" / name).read_bytes() for name in CONTENT} == CONTENT


def part(folder: Path, content: bytes, name: str = "one.bin") -> Path:
    (folder / "plain-folder").mkdir(parents=True)
    path = folder / "plain-folder" / f"{name}.part"
    path.write_bytes(content)
    return path


def test_a_set_arrives_and_is_not_fetched_twice(tmp_path, site, plain):
    seen = []
    done = fetch("plain", tmp_path / "new", watch=lambda file, held: seen.append((file.name, held)))
    assert_complete(tmp_path / "new")
    assert done.downloaded == ("one.bin", "two.bin")
    assert done.folder == tmp_path / "new" / "plain-folder"
    assert [held for name, held in seen if name == "two.bin"][-1] == SIZE
    assert [path for path, _ in site.asked] == ["/one.bin", "/two.bin"]
    assert fetch("plain", tmp_path / "new").downloaded == ()
    assert len(site.asked) == 2
    (tmp_path / "new" / "plain-folder" / "one.bin").unlink()
    assert fetch("plain", tmp_path / "new").downloaded == ("one.bin",)
    assert_complete(tmp_path / "new")


def test_from_another_place_and_into_the_default_directory(tmp_path, site, plain, monkeypatch):
    monkeypatch.setenv("MODELMIX_DATA", str(tmp_path))
    site.files = {f"mirror/deep/{name}": content for name, content in CONTENT.items()}
    fetch("plain", None, url_base=f"{site.url}/mirror/deep/")
    assert_complete(tmp_path)


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path, site, plain):
    part(tmp_path, CONTENT["one.bin"][:123_456])
    notes = []
    fetch("plain", tmp_path, note=notes.append)
    assert_complete(tmp_path)
    assert site.asked[0] == ("/one.bin", "bytes=123456-")
    assert "holds 123,456 of 300,000 bytes" in notes[0]


def test_a_part_that_is_already_whole_needs_no_server(tmp_path, site, plain):
    part(tmp_path, CONTENT["one.bin"])
    fetch("plain", tmp_path)
    assert_complete(tmp_path)
    assert [path for path, _ in site.asked] == ["/two.bin"]


def test_a_server_without_ranges_starts_again_cleanly(tmp_path, site, plain):
    site.ranges = False
    part(tmp_path, CONTENT["one.bin"][:123_456])
    fetch("plain", tmp_path)
    assert_complete(tmp_path)


@pytest.mark.parametrize("ranges", [True, False])
def test_connections_that_are_cut(tmp_path, site, plain, ranges):
    site.ranges, site.cuts = ranges, [100_000, 50_000, 0, 70_000]
    fetch("plain", tmp_path)
    assert_complete(tmp_path)
    ones = [asked for path, asked in site.asked if path == "/one.bin"]
    assert ones[:3] == [None, "bytes=100000-", "bytes=150000-" if ranges else "bytes=50000-"]


def test_a_length_that_is_not_told(tmp_path, site, plain):
    site.tell_length, site.cuts = False, [100_000]
    fetch("plain", tmp_path)
    assert_complete(tmp_path)


def test_a_connection_that_stalls(tmp_path, site, plain):
    site.cuts, site.stall = [100_000], 1.5
    fetch("plain", tmp_path, retry=RetryPolicy(timeout=0.3, attempts=2, pause=0.001))
    assert_complete(tmp_path)
    assert site.asked[1][1] == "bytes=100000-"  # what had arrived before the stall is kept


def test_a_network_that_stays_bad_keeps_what_arrived(tmp_path, site, plain):
    site.cuts = [100_000, 0, 0, 0]
    message = refused("plain", tmp_path)
    assert (
        "could not be fetched in 3 attempts: the connection ended early; 100,000 of 300,000 bytes are kept" in message
    )
    assert names(tmp_path) == ["plain-folder/one.bin.part"]
    fetch("plain", tmp_path)
    assert_complete(tmp_path)
    assert site.asked[4] == ("/one.bin", "bytes=100000-")


def test_nobody_answers(tmp_path, plain):
    message = refused("plain", tmp_path, url_base="http://127.0.0.1:9")
    assert "could not be fetched in 3 attempts" in message
    assert "nothing is kept" in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_is_busy_is_asked_again(tmp_path, site, plain, status):
    site.statuses = [status, status]
    fetch("plain", tmp_path)
    assert_complete(tmp_path)
    site.statuses = [status] * 3
    assert f"the server answered {status}" in refused("plain", tmp_path / "again")


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_server_that_says_no_is_asked_once(tmp_path, site, plain, status):
    site.statuses = [status]
    message = refused("plain", tmp_path)
    assert f"{site.url}/one.bin cannot be fetched: the server answered {status}" in message
    assert "--url-base" in message
    assert len(site.asked) == 1
    assert names(tmp_path) == []


def test_wrong_bytes_are_removed_and_said(tmp_path, site, plain):
    site.files["one.bin"] = bytes(SIZE)
    message = refused("plain", tmp_path)
    published = sha256(CONTENT["one.bin"]).hexdigest()
    assert f"it gave 300,000 bytes of another checksum than the published sha256:{published}" in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("begun", [b"", CONTENT["one.bin"][:50]])
def test_a_file_of_another_length_is_seen_at_once(tmp_path, site, plain, begun):
    """A page that asks to log in first, say; a good beginning is not lost to it."""
    site.files["one.bin"] = b"<html>" * 100
    if begun:
        part(tmp_path, begun)
    assert "the server has 600 bytes under this address, published are 300,000" in refused("plain", tmp_path)
    assert names(tmp_path) == (["plain-folder/one.bin.part"] if begun else [])


@pytest.mark.parametrize("begun", [0, 1000])
def test_a_shorter_file_of_untold_length_is_not_fetched_for_ever(tmp_path, site, plain, begun):
    site.files["one.bin"], site.tell_length = b"<html>" * 100, False
    site.statuses = [None] * 9 + [404]  # ends the test should it ask on and on
    if begun:
        part(tmp_path, CONTENT["one.bin"][:begun])
    message = refused("plain", tmp_path)
    assert f"{site.url}/one.bin is not the published file: it ends after 600 bytes, published are 300,000" in message
    assert names(tmp_path) == []


def test_an_endless_file_is_cut_short(tmp_path, site, plain):
    site.files["one.bin"], site.tell_length = bytes(20 * SIZE), False
    message = refused("plain", tmp_path)
    given = int(message.split("it gave ")[1].split(" bytes")[0].replace(",", ""))
    assert SIZE < given < 3 * SIZE
    assert names(tmp_path) == []


@pytest.mark.parametrize("wrong", [b"wrong" * 100, bytes(SIZE), bytes(SIZE + 1)])
def test_a_part_that_is_wrong_is_removed_and_fetched_anew(tmp_path, site, plain, wrong):
    path, notes = part(tmp_path, wrong), []
    fetch("plain", tmp_path, note=notes.append)
    assert_complete(tmp_path)
    assert f"{path} was not the beginning of the published file: it is removed" in notes[-1]
    assert site.asked[-2] == ("/one.bin", None)


@pytest.mark.parametrize("trouble", ["other place", "no such range"])
def test_a_range_that_does_not_fit_is_not_used(tmp_path, site, plain, trouble):
    part(tmp_path, CONTENT["one.bin"][:1000])
    if trouble == "other place":
        site.shift = 1
    else:
        site.statuses = [416]
    fetch("plain", tmp_path)
    assert_complete(tmp_path)
    assert [asked for _, asked in site.asked] == ["bytes=1000-", None, None]


def test_a_file_that_is_there_and_wrong_is_left_alone(tmp_path, site, plain):
    (tmp_path / "plain-folder").mkdir()
    path = tmp_path / "plain-folder" / "one.bin"
    path.write_bytes(b"mine")
    assert f"{path} is there but is not the published file: its sha256 is" in refused("plain", tmp_path)
    assert path.read_bytes() == b"mine"
    assert site.asked == []


class FullDisk(io.FileIO):
    """A disk with room for ``room`` bytes, which takes a part of what does not fit, as real ones do."""

    room = 0
    error = errno.ENOSPC

    def write(self, piece):
        left = self.room - os.fstat(self.fileno()).st_size
        if left <= 0:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(bytes(piece[:left]))


@pytest.mark.parametrize("room", [0, 123_456])
def test_a_full_disk(tmp_path, site, plain, monkeypatch, room):
    disk = type("Disk", (FullDisk,), {"room": room})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode, buffering: disk(self, mode))
        message = refused("plain", tmp_path)
    assert f"the disk is full: {tmp_path / 'plain-folder' / 'one.bin.part'} holds {room:,} bytes" in message
    assert names(tmp_path) == (["plain-folder/one.bin.part"] if room else [])
    fetch("plain", tmp_path)
    assert_complete(tmp_path)
    assert room == 0 or ("/one.bin", f"bytes={room}-") in site.asked


def test_a_disk_that_fails_otherwise(tmp_path, plain, monkeypatch):
    disk = type("Disk", (FullDisk,), {"error": errno.EIO})
    monkeypatch.setattr(Path, "open", lambda self, mode, buffering: disk(self, mode))
    assert "cannot write" in refused("plain", tmp_path)


def test_a_directory_that_cannot_be_made(tmp_path, plain):
    (tmp_path / "file").write_bytes(b"")
    assert "cannot write" in refused("plain", tmp_path / "file" / "in")


def test_an_interrupted_process_leaves_no_half_file_under_the_final_name(tmp_path, site, plain):
    def stop(file: File, held: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("plain", tmp_path, watch=stop)
    assert names(tmp_path) == ["plain-folder/one.bin.part"]
    fetch("plain", tmp_path)
    assert_complete(tmp_path)


def test_two_at_once_do_not_spoil_each_other(tmp_path, plain):
    seen = []

    def meanwhile(file: File, held: int) -> None:
        if not seen:
            seen.append(refused("plain", tmp_path))

    fetch("plain", tmp_path, watch=meanwhile)
    assert "another process is fetching" in seen[0]
    assert_complete(tmp_path)


@pytest.mark.parametrize(
    "url", ["file:///etc", "ftp://127.0.0.1", "127.0.0.1/x", "http://", "http://h:port", "http://a b/", "http://é.de"]
)
def test_odd_addresses(tmp_path, plain, url):
    assert "cannot be fetched" in refused("plain", tmp_path, url_base=url)
    assert names(tmp_path) == []


def test_an_unknown_set(tmp_path):
    assert "there is no public data set 'x': allowed are cifar10, svhn, fashion-mnist" in refused("x", tmp_path)


def test_an_archive_is_unpacked_and_removed(tmp_path, site, packed):
    packed([*sound(), (tarfile.TarInfo("inside/readme.html"), b"hello")])
    done = fetch("packed", tmp_path)
    assert done.downloaded == ("set.tar.gz",)
    assert names(tmp_path) == ["inside/one.bin", "inside/two.bin"]
    assert (done.folder / "two.bin").read_bytes() == CONTENT["two.bin"]
    assert fetch("packed", tmp_path).downloaded == ()
    (done.folder / "two.bin").unlink()
    assert fetch("packed", tmp_path).downloaded == ("set.tar.gz",)
    assert names(tmp_path) == ["inside/one.bin", "inside/two.bin"]
    assert len(site.asked) == 2


def test_an_archive_of_the_users_own_is_used_and_stays(tmp_path, site, packed):
    packed(sound())
    (tmp_path / "set.tar.gz").write_bytes(site.files["set.tar.gz"])
    assert fetch("packed", tmp_path).downloaded == ()
    assert names(tmp_path) == ["inside/one.bin", "inside/two.bin", "set.tar.gz"]
    assert site.asked == []


def test_a_member_that_is_there_and_wrong_is_said_before_the_download(tmp_path, site, packed):
    packed(sound())
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "one.bin").write_bytes(b"mine")
    assert "is there but is not the published file" in refused("packed", tmp_path)
    assert site.asked == []


def linked(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([(tarfile.TarInfo(f"../inside/{n}"), c) for n, c in CONTENT.items()], "has no inside/one.bin"),
        ([(tarfile.TarInfo(f"/inside/{n}"), c) for n, c in CONTENT.items()], "has no inside/one.bin"),
        ([linked("inside/one.bin", "/etc/passwd"), sound()[1]], "is no plain file"),
        ([linked("inside/one.bin", "inside/two.bin", tarfile.LNKTYPE), sound()[1]], "is no plain file"),
        ([linked("inside", ".."), linked("inside/one.bin", "x")], "is no plain file"),
        ([*sound(), sound()[0]], "comes twice"),
        ([(tarfile.TarInfo("inside/one.bin"), bytes(SIZE + 1))], "holds more than 300,000 bytes"),
        ([(tarfile.TarInfo("inside/one.bin"), bytes(SIZE))], "holds another inside/one.bin than the published one"),
        ([], "has no inside/one.bin"),
    ],
)
def test_an_archive_with_something_wrong(tmp_path, packed, members, reason):
    """Even one that carries the published checksum writes nothing outside its folder and nothing wrong inside it."""
    packed(members)
    assert reason in refused("packed", tmp_path / "data")
    written = [name for name in names(tmp_path) if name != "data/set.tar.gz"]
    assert {*written} <= {"data/inside/one.bin", "data/inside/two.bin"}
    for name in written:
        assert (tmp_path / name).read_bytes() == CONTENT[Path(name).name]


def test_a_disk_that_fills_while_unpacking(tmp_path, site, packed, monkeypatch):
    packed(sound())
    (tmp_path / "set.tar.gz").write_bytes(site.files["set.tar.gz"])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in refused("packed", tmp_path)
    assert names(tmp_path) == ["set.tar.gz"]


def test_the_catalogue_names_every_file_with_its_checksum():
    for public in catalogue.CATALOGUE.values():
        assert public.licence
        assert not public.url.endswith("/")
        for file in (*public.files, *public.members):
            algorithm, _, digest = file.checksum.partition(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]
            assert file.size > 0
