"""Which sources of notices this node has, found within about a second: no cloud is waited for that
is not there.

The environment counts first (the SDKs' own variables), then what the firmware says the machine is.
Only where it says nothing (/sys is not there) all three metadata addresses are asked at once,
without waiting for the slowest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.cluster.notices.sources import aws, azure, gcp, kubernetes, notice_file
from elastic.cluster.notices.sources.metadata_request import NoticeSource

FIRMWARE = Path("/sys/class/dmi/id")
MOST_S = 1.0
AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
NAMED = {  # variables that say where to ask
    "AWS": ("AWS_EC2_METADATA_SERVICE_ENDPOINT",), "GCP": ("GCE_METADATA_HOST", "GCE_METADATA_IP"),
    "Azure": (azure.ENDPOINT,),
}  # fmt: skip


@dataclass(frozen=True)
class ProbedMachine:
    """What is looked at. `named_only`: metadata addresses are asked only where environment or
    firmware name their cloud."""

    environ: Mapping[str, str]
    firmware: Path = FIRMWARE
    account: Path = kubernetes.ACCOUNT
    named_only: bool = False


@dataclass(frozen=True)
class Sources:
    """`notes`: why a source that should be here is not, for a person."""

    found: tuple[NoticeSource, ...] = ()
    notes: tuple[str, ...] = ()


def sources_of(place: ProbedMachine) -> Sources:
    """Takes at most about MOST_S. A cloud that is named but does not answer yet stays: it is asked
    on."""
    found: list[NoticeSource] = []
    notes: list[str] = []
    path = place.environ.get(notice_file.VARIABLE)
    if path:
        found.append(notice_file.NoticeFile(path))
    certain, possible = _clouds(place)
    pod, note = _pod(place)
    notes += [note] if note else []
    answers = _greeted([*certain, *possible, *([pod] if pod else [])])
    for source in certain:
        found.append(source)
        if answers.get(source.name, "no answer"):
            notes.append(f"{source.name}: {answers.get(source.name, 'no answer')}; asked again")
    found += [source for source in possible if answers.get(source.name) == ""]
    if pod is not None:
        why = answers.get(pod.name, "no answer")
        if "may not" in why:
            notes.append(why)
        else:
            found.append(pod)
    return Sources(tuple(found), tuple(notes))


def cloud_of(firmware: Path) -> str | None:
    """What the firmware says: AWS, GCP, Azure, '' = something else; None = it says nothing."""
    texts = {}
    for name in ("sys_vendor", "product_name", "bios_version", "bios_vendor", "chassis_asset_tag"):
        try:
            texts[name] = (firmware / name).read_text().strip()
        except OSError:
            continue
    if not texts:
        return None
    said = " ".join(texts.values()).lower()
    if "amazon" in said:
        return "AWS"
    if "google" in said:
        return "GCP"
    return "Azure" if texts.get("chassis_asset_tag") == AZURE_CHASSIS else ""


def _clouds(place: ProbedMachine) -> tuple[list[NoticeSource], list[NoticeSource]]:
    """Those that are named, and those that might be here."""
    environ = place.environ
    make: dict[str, Callable[[], NoticeSource | None]] = {
        "AWS": lambda: aws.Aws(endpoint) if (endpoint := aws.endpoint_of(environ)) else None,
        "GCP": lambda: gcp.Gcp(gcp.endpoint_of(environ)),
        "Azure": lambda: azure.Azure(azure.endpoint_of(environ)),
    }
    named = [cloud for cloud, names in NAMED.items() if any(environ.get(name) for name in names)]
    said = cloud_of(place.firmware)
    certain = named or ([said] if said else [])
    possible = list(make) if not certain and said is None and not place.named_only else []
    return _made(make, certain), _made(make, possible)


def _made(
    make: Mapping[str, Callable[[], NoticeSource | None]], names: Sequence[str]
) -> list[NoticeSource]:
    return [source for name in names if (source := make[name]()) is not None]


def _pod(place: ProbedMachine) -> tuple[NoticeSource | None, str]:
    if "KUBERNETES_SERVICE_HOST" not in place.environ:
        return None, ""
    try:
        return kubernetes.Kubernetes(place.environ, place.account), ""
    except OSError as error:
        return (
            None,
            f"Kubernetes: this pod has no service account to ask with ({error.strerror or error})",
        )


def _greeted(sources: Sequence[NoticeSource]) -> dict[str, str]:
    """Name -> '' = it answers, else why not; those that have not answered within MOST_S are left
    out."""
    answers: dict[str, str] = {}

    def greet(source: NoticeSource) -> None:
        try:
            source.greet()
            answers[source.name] = ""
        except OSError as error:
            answers[source.name] = str(error) or type(error).__name__

    threads = [threading.Thread(target=greet, args=(source,), daemon=True) for source in sources]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + MOST_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    return dict(answers)
