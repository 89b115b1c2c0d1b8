"""Which GPUs of a machine the embedded cluster hands out, and by which interface those speak."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cluster.local.local_cluster import _environment, visible_gpus


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("0,2", ("0", "2")),
        ("", ()),
        ("-1", ()),
        ("1,-1,0", ("1",)),
        ("GPU-8932f937-d72c, 1", ("GPU-8932f937-d72c", "1")),
        ("MIG-GPU-8932f937/1/0,MIG-4f5e", ("MIG-GPU-8932f937/1/0", "MIG-4f5e")),
        ("NoDevFiles", ()),
    ],
)
def test_those_that_the_user_has_chosen(
    said: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert visible_gpus() == found


def test_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == ()
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus(tmp_path) == ("0", "1"), "no /proc of the driver, as in some sandboxes"
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert visible_gpus(tmp_path) == ("0", "1", "2")


def test_its_workers_stay_on_loopback_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would listen on the first other interface."""
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [_environment([])[name] for name in names] == ["lo", "lo"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine0")
    assert [_environment([])[name] for name in names] == ["mine0", "lo"]
