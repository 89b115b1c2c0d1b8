"""The node's cache: remote files are read once, by however many processes; a limit; damaged blocks
are read again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from elastic.data.progress import gets_on, heard_by
from elastic.data.sources import block_cache as module
from elastic.data.sources.block_cache import BlockCache, Remote
from elastic.data.sources.files import files_at
from elastic.errors import SpecError
from elastic.storage import LocalStorage, open_storage

BLOCK = 1000


class Counted(LocalStorage):
    """Counts what is read of it."""

    read_bytes = 0

    def read(self, key: str, offset: int, length: int) -> bytearray:
        data = super().read(key, offset, length)
        self.read_bytes += len(data)
        return data


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(module, "USED_EVERY_S", -1.0)


@pytest.fixture
def far(tmp_path: Path) -> Remote:
    storage = Counted(tmp_path / "far")
    storage.put("data", os.urandom(10 * BLOCK + 123))
    return Remote(storage, "data", 10 * BLOCK + 123, 1.0)


def read_bytes(file: Remote) -> int:
    assert isinstance(file.storage, Counted)
    return file.storage.read_bytes


def blocks(cache: BlockCache) -> list[Path]:
    return sorted(path for path in (cache.folder / "blocks").rglob("*") if path.is_file())


def test_ranges_over_blocks(far: Remote) -> None:
    whole, cache = far.storage.get("data"), BlockCache()
    for offset, length in (
        (0, 5),
        (BLOCK - 1, 2),
        (0, 10 * BLOCK + 123),
        (10 * BLOCK, 500),
        (20 * BLOCK, 3),
        (77, 0),
    ):
        assert cache.read(far, offset, length) == whole[offset : offset + length]


def test_read_once_by_many_threads_and_processes(far: Remote) -> None:
    caches = [BlockCache() for _ in range(4)]  # each has its own memory, as a process has
    threads = [threading.Thread(target=cache.read, args=(far, 0, far.n_bytes)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_bytes(far) == far.n_bytes
    code = (
        "import sys; from elastic.data.sources import block_cache as c; from elastic.storage "
        f"import LocalStorage\nc.BLOCK_BYTES = {BLOCK}\nfar = c.Remote(LocalStorage(sys.argv[1]), "
        "'data', int(sys.argv[2]), 1.0)\nc.BlockCache._fetched = "
        "None\nsys.stdout.buffer.write(c.BlockCache().read(far, 0, far.n_bytes))"
    )
    at = [str(far.storage.uri), str(far.n_bytes)]
    done = subprocess.run([sys.executable, "-c", code, *at], capture_output=True, check=False)
    assert done.stdout == far.storage.get("data"), done.stderr


def test_the_limit_holds_and_the_longest_unused_goes_first(
    far: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(limit_bytes=5 * (BLOCK + 8))
    now_s = 1000.0
    monkeypatch.setattr(module.time, "time", lambda: now_s)
    for number in (0, 1, 2, 3, 0, 4, 5, 6, 0, 7):
        now_s += 10
        cache.read(far, number * BLOCK, 1)
        for path in blocks(cache):
            if path.stat().st_mtime > 1_000_000:
                # the clock of the file system is another one than the test's
                os.utime(path, (now_s, now_s))
        assert sum(path.stat().st_size for path in blocks(cache)) <= cache.limit_bytes
    kept = {int(path.name.rpartition("-")[2]) for path in blocks(cache)}
    assert {0, 7} <= kept and not {1, 2} & kept
    before = read_bytes(far)
    cache.read(far, 0, 1)
    assert read_bytes(far) == before
    cache.read(far, BLOCK, 1)
    assert read_bytes(far) == before + BLOCK


@pytest.mark.parametrize("damage", ["cut", "altered", "empty"])
def test_a_damaged_block_is_read_again(
    far: Remote, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = far.storage.get("data")
    BlockCache().read(far, 0, 1)
    (path,) = blocks(BlockCache())
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes({"cut": bytes(data[:-9]), "altered": bytes(data), "empty": b""}[damage])
    before = read_bytes(far)
    assert BlockCache().read(far, 490, 20) == whole[490:510]
    assert read_bytes(far) == before + BLOCK and "read again" in caplog.text
    assert BlockCache().read(far, 490, 20) == whole[490:510]
    assert read_bytes(far) == before + BLOCK


def test_a_block_that_is_cut_off_while_it_is_in_use(far: Remote) -> None:
    cache = BlockCache()
    cache.read(far, 0, 1)
    (path,) = blocks(cache)
    os.truncate(path, 100)
    assert cache.read(far, 90, 20) == far.storage.get("data")[90:110]


def test_a_file_that_was_replaced_is_another_one(far: Remote) -> None:
    BlockCache().read(far, 0, 10)
    far.storage.put("data", b"x" * far.n_bytes)
    assert BlockCache().read(Remote(far.storage, "data", far.n_bytes, 2.0), 0, 4) == b"xxxx"
    far.storage.put("data", b"x" * 100)
    with pytest.raises(SpecError, match=r"far/data: it is shorter than the 10123 bytes"):
        BlockCache().read(far, 5 * BLOCK, 10)


@pytest.mark.parametrize("refused", ["block", "count", "lock"])
def test_a_full_disk_only_costs_time(
    far: Remote, refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    cache = BlockCache()
    name = {"block": "write_bytes", "count": "write_text"}.get(refused)
    monkeypatch.setattr(*((Path, name, full) if name else (cache, "_opened", full)))
    for _ in range(2):
        assert cache.read(far, 0, 3) == far.storage.get("data")[:3]
    assert "No space left" in caplog.text and bool(blocks(cache)) == (refused != "block")


def test_on_a_full_disk_no_whole_blocks_are_fetched_for_their_larger_half(
    far: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    cache = BlockCache()
    cache.expect(2 * cache.limit_bytes)
    for number in range(5):
        cache.read(far, number * BLOCK, BLOCK * 3 // 5)
    assert caplog.text.count("No space left") == 1


def test_what_is_remembered_of_blocks_is_bounded(
    far: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another process removes them."""
    monkeypatch.setattr(module, "CHECKED_MOST", 7)
    cache = BlockCache(limit_bytes=5 * (BLOCK + 8))
    for number in range(11):
        for offset in (0, 1):  # fetched; from the disk, and checked
            cache.read(far, number * BLOCK + offset, 1)
        (path,) = blocks(cache)
        path.unlink()
    assert len(cache._checked) == 7


def test_blocks_of_small_files_are_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than whole blocks would fit."""
    storage, cache = LocalStorage(tmp_path / "far"), BlockCache(limit_bytes=5 * (BLOCK + 8))
    names, summed, real = [f"{n:02d}" for n in range(16)], list[int](), module._sum
    for name in names:
        storage.put(name, os.urandom(BLOCK // 4))
    monkeypatch.setattr(module, "_sum", lambda data: summed.append(1) or real(data))
    counts = []
    for _ in range(3):  # fetched; from the disk, and checked; from the disk
        del summed[:]
        for name in names:
            file = Remote(storage, name, BLOCK // 4, 1.0)
            assert cache.read(file, 10, 20) == storage.read(name, 10, 20)
        counts.append(len(summed))
    assert counts == [16, 16, 0]


def remote(folder: Path, n_blocks: int) -> Remote:
    storage = Counted(folder / "large")
    storage.put("data", os.urandom(n_blocks * BLOCK))
    return Remote(storage, "data", n_blocks * BLOCK, 1.0)


def test_of_files_that_do_not_fit_little_more_is_fetched_than_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of 8 KB in blocks of 4 MB, a tenth as large here: a block for each was 500 times as
    much."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 400 * BLOCK)
    monkeypatch.setattr(module, "RANGE_BYTES", 4 * BLOCK)
    large, draw = remote(tmp_path, 40_000), Random(0)
    whole = large.storage.get("data")
    cache = BlockCache(limit_bytes=5 * 400 * BLOCK + 40)
    cache.expect(large.n_bytes)
    for _ in range(1000):
        offset = draw.randrange(large.n_bytes)
        assert cache.read(large, offset, 800) == whole[offset : offset + 800]
    fetched = read_bytes(large) / 1000
    assert fetched < 3 * module.RANGE_BYTES
    assert 1 <= len(blocks(cache)) <= 5  # some of them: what nearly fits comes from the disk


def test_of_files_that_do_not_fit_whole_blocks_are_kept_while_there_is_room(tmp_path: Path) -> None:
    """Each sample is a block, in another order each time: half of the files are in the cache."""
    large, draw, passes = remote(tmp_path, 100), Random(0), list[float]()
    cache = BlockCache(limit_bytes=50 * (BLOCK + 8))
    cache.expect(2 * cache.limit_bytes)
    for _ in range(3):
        before = read_bytes(large)
        for number in draw.sample(range(100), 100):
            data = cache.read(large, number * BLOCK, BLOCK)
            assert data == large.storage.read(large.key, number * BLOCK, BLOCK)
            before += BLOCK  # what was compared with
        passes.append((read_bytes(large) - before) / large.n_bytes)
    assert passes[0] == 1.0 and max(passes[1:]) <= 0.75
    assert sum(path.stat().st_size for path in blocks(cache)) <= cache.limit_bytes


def test_of_files_that_do_not_fit_small_pieces_in_a_row_are_fetched_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 400 * BLOCK)
    monkeypatch.setattr(module, "RANGE_BYTES", 4 * BLOCK)
    large, found, fetched = remote(tmp_path, 4_000), bytearray(), list[int]()
    cache = BlockCache(limit_bytes=400 * BLOCK)
    cache.expect(large.n_bytes)
    real = cache._fetched
    monkeypatch.setattr(cache, "_fetched", lambda *a: fetched.append(a[2]) or real(*a))
    while data := cache.read(large, len(found), 700):
        found += data
    assert bytes(found) == large.storage.get("data")
    assert sum(fetched) < 1.1 * large.n_bytes and len(fetched) < 40


def test_built_once_while_others_wait() -> None:
    built: list[int] = []

    def build(into: Path) -> None:
        built.append(1)
        (into / "done").write_text("yes")

    def once() -> None:
        assert (BlockCache().once("thing", build) / "done").read_text() == "yes"

    threads = [threading.Thread(target=once) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    done = BlockCache().folder / "built" / "thing" / "done"
    (done.parent / "more").write_text("what came later")
    once()
    assert built == [1]
    for harm in (done.unlink, lambda: done.write_text("ye")):
        built.clear()
        harm()
        once()
        assert built == [1]


def test_a_build_that_fails_leaves_nothing() -> None:
    def build(into: Path) -> None:
        (into / "half").write_text("")
        raise SpecError("no")

    with pytest.raises(SpecError, match="no"):
        BlockCache().once("thing", build)
    assert not [*(BlockCache().folder / "built").iterdir()]


def test_where_it_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"file/cache: Not a directory; .*ELASTIC_CACHE"):
        BlockCache(tmp_path / "file" / "cache")
    with pytest.raises(SpecError, match="holds no block"):
        BlockCache(limit_bytes=5)


def test_object_storage_is_asked_once_for_each_block(
    s3: open_storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(3 * BLOCK + 5)
    s3.put("a/x.txt", data)
    s3.put("a/site-packages/y.txt", b"no")
    s3.put("b.txt", b"short")
    reads: list[int] = []
    real = type(s3).read_into
    monkeypatch.setattr(type(s3), "read_into", lambda self, *a: reads.append(1) or real(self, *a))
    for _ in range(3):
        found = files_at(s3.uri, "**/*.txt")
        assert found.names == ("a/x.txt", "b.txt") and found.sizes == (len(data), 5)
        assert found.read(0, 10, 10_000) == data[10:] and found.read(1, 0, 5) == b"short"
    assert len(reads) == 5
    assert files_at(s3.uri_of("b.txt"), "**").names == ("b.txt",)
    with pytest.raises(SpecError, match=r"no file matches '\*\.md'"):
        files_at(s3.uri, "*.md")


def test_what_a_killed_builder_has_left_is_swept_and_what_is_being_built_is_not() -> None:
    cache = BlockCache()
    shelf = cache.folder / "built"
    for left in (".thing-00000000", ".other-0123abcd", ".busy-0123abcd"):
        (shelf / left).mkdir()
        (shelf / left / "half").write_text("")

    def build(into: Path) -> None:
        assert {path.name for path in shelf.iterdir()} == {into.name, ".busy-0123abcd"}

    with cache._lock("built-busy"):
        cache.once("thing", build)
    cache.once("third", lambda into: None)
    assert {path.name for path in shelf.iterdir()} == {"thing", "third"}


def test_a_builder_that_gets_on_is_heard_by_those_who_wait_for_it() -> None:
    began, heard, here = threading.Event(), threading.Event(), list[int]()

    def build(into: Path) -> None:
        began.set()
        for _ in range(10_000):
            gets_on()
            if heard.wait(0.01):
                return
        raise AssertionError("nobody has heard")

    def waits() -> None:
        assert began.wait(60)
        with heard_by(heard.set):
            BlockCache().once("slow", build)

    thread = threading.Thread(target=waits)
    thread.start()
    with heard_by(lambda: here.append(1)):
        BlockCache().once("slow", build)
    thread.join()
    assert here


def test_one_that_holds_a_lock_and_hangs_is_not_waited_for(
    far: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOCK_MOST_S", 0.1)
    cache = BlockCache()
    with ExitStack() as held:
        for k in range(module.N_LOCKS):
            held.enter_context(cache._lock(f"block-{k}"))
        assert BlockCache().read(far, 0, 10) == far.storage.read(far.key, 0, 10)
    assert "has been held for" in caplog.text
