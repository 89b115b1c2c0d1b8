"""Of which kind an error is: CUDA's own by what they say, told from those of the program and of
process groups."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elastic.errors import InternalError, ProgramError, SpecError, StorageRefused
from elastic.worker.process.cuda_errors import device_lost, is_assert, out_of_memory
from elastic.worker.session.worker_errors import kind_of, print_error, text_of

ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect."
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def cuda(said: str, kind: type[Exception] = torch.AcceleratorError) -> Exception:
    return kind(f"CUDA error: {said}{ADVICE}")


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
@pytest.mark.parametrize(
    "said",
    [
        "uncorrectable ECC error encountered", "unspecified launch failure",
        "an illegal memory access was encountered",
        "uncorrectable NVLink error detected during the execution",
        "the launch timed out and was terminated",
        "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle )`", "unknown error",
    ],
)  # fmt: skip
def test_a_sticky_error_is_the_devices_in_one_line(kind: type[Exception], said: str) -> None:
    error = cuda(said, kind)
    assert kind_of(error) == "device" and device_lost(error) and not is_assert(error)
    assert text_of(error) == f"CUDA error: {said}"


@pytest.mark.parametrize(
    ("said", "kind", "lost"),
    [
        ("out of memory", "out_of_memory", False),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory", False),
        ("device-side assert triggered", "program", True),
        ("invalid configuration argument", "program", False),
        ("no kernel image is available for execution on the device", "program", False),
        ("CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle )`", "program", False),
    ],
)
def test_what_is_not_the_devices_fault(said: str, kind: str, lost: bool) -> None:
    error = cuda(said)
    assert (kind_of(error), device_lost(error), is_assert(error)) == (kind, lost, lost)


def test_an_error_that_came_of_cudas_is_cudas() -> None:
    error = ProgramError("Program.loss raised")
    error.__cause__ = cuda("unspecified launch failure")
    assert kind_of(error) == "device" and text_of(error) == "CUDA error: unspecified launch failure"
    copy = InternalError(
        f"the host copy of step 4 was not completed: {cuda('unspecified launch failure')}"
    )
    assert kind_of(copy) == "device"


def test_other_errors_are_as_they_were() -> None:
    assert kind_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) == "program"
    assert kind_of(KeyError("CUDA error: a word in a key")) == "program"
    assert kind_of(RuntimeError("Connection closed by peer [127.0.0.1]:1")) == "collective"
    assert (
        kind_of(dist.DistBackendError("NCCL error: unhandled CUDA error: see the log"))
        == "collective"
    )
    assert (
        kind_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
        == "out_of_memory"
    )


NCCL_SAID = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {what}, NCCL version "
    "2.27.5\n{name}\nLast error:\n{last}"
)
UNHANDLED = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
OF_CUDA = "ncclUnhandledCudaError: Call to CUDA function failed."


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        ("Cuda failure 2 'out of memory'", "out_of_memory"),
        ("Cuda failure 'out of memory'", "out_of_memory"),
        ("Failed to CUDA calloc 6291456 bytes", "out_of_memory"),
        ("Failed to CUDA calloc async 2432 bytes", "out_of_memory"),
        ("Failed to CUDA malloc 4194304 bytes", "out_of_memory"),
        ("Cuda failure 1 'invalid argument'", "collective"),
        ("socketProgress: Connection closed by remote peer", "collective"),
    ],
)
def test_memory_that_nccl_lacks_is_no_broken_network(last: str, kind: str) -> None:
    error = dist.DistBackendError(NCCL_SAID.format(what=UNHANDLED, name=OF_CUDA, last=last))
    wrapped = ProgramError("Program.loss raised")
    wrapped.__cause__ = error
    assert kind_of(error) == kind and out_of_memory(wrapped) == (kind == "out_of_memory")


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it raises is looked at
        return error
    raise AssertionError("it raised nothing")


def gives_up(words: str, kind: type[Exception] = RuntimeError) -> None:
    raise kind(words)


@pytest.mark.parametrize(
    "words",
    ["the feature store did not answer", "socket is full", "timeout after 5 s", "no rendezvous"],
)
def test_what_the_program_raises_is_its_own_whatever_words_it_takes(words: str) -> None:
    assert kind_of(raised(lambda: gives_up(words))) == "program"
    wrapped = ProgramError("Program.loss raised")
    wrapped.__cause__ = raised(lambda: gives_up(words))
    assert kind_of(wrapped) == "program"


def test_nor_is_a_connection_of_its_own_a_lost_peer() -> None:
    """It may come back: the step is retried."""
    found = raised(lambda: gives_up("the feature store has closed", ConnectionResetError))
    assert kind_of(found) == "infrastructure"
    with closing(socket.socket()) as port:
        port.bind(("127.0.0.1", 0))
        refused = raised(
            lambda: socket.create_connection(("127.0.0.1", port.getsockname()[1]), timeout=1.0)
        )
    assert kind_of(refused) == "infrastructure"


def test_a_process_group_that_the_program_calls_is_still_a_lost_peer() -> None:
    def waits() -> None:
        dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=0.1)).get("never set")

    found = raised(waits)
    # C++ raised it at a line of the program
    assert isinstance(found, RuntimeError) and kind_of(found) == "collective"

    def wraps() -> None:
        try:
            waits()
        except RuntimeError as error:
            raise RuntimeError("my training has failed") from error

    assert kind_of(raised(wraps)) == "collective"
    # no group was made: nobody is lost
    assert kind_of(raised(lambda: dist.all_reduce(torch.ones(1)))) == "program"


def test_the_traceback_that_is_kept_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    def logs_in(secret: str) -> None:
        raise ValueError(f"cannot log in at https://me:{secret}@host/x with --hf-token {secret}")

    try:
        logs_in("zq7-" + "planted")
    except ValueError as error:
        print_error(error)
    said = capsys.readouterr().err
    assert "in logs_in" in said and said.endswith(
        "ValueError: cannot log in at https://me:***@host/x with --hf-token ***\n"
    )


def test_storage_that_refuses_is_no_fault_of_the_program() -> None:
    """Its credentials may be renewed."""
    cause = RuntimeError("An error occurred (ExpiredToken) when calling GetObject")
    refused = StorageRefused("s3://b/k: reading was refused (ExpiredToken): renew them")
    refused.__cause__ = cause
    assert kind_of(refused) == "refused" and text_of(refused) == str(refused)
    assert kind_of(SpecError("the layout")) == "program"


def test_no_half_of_a_secret_is_left_where_a_long_text_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789abcdef" * 3)
    for length in (560, 580):
        assert "0123456" not in text_of(RuntimeError("x" * length + "0123456789abcdef" * 3))
