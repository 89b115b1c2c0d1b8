"""What the README claims, and which checks of certify show it.

In the README each claim stands between `<!-- claim: ID -->` and `<!-- /claim -->`; docs/proven.md
quotes it from there. A mark at the beginning of a line stands alone in it: Markdown takes the rest
of such a line for HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.errors import SpecError

MARK = re.compile(r"<!--\s*(/?)claim(?::\s*([a-z0-9-]+))?\s*-->")


@dataclass(frozen=True)
class Claim:
    """`checks`: names of certify's checks that show it ('*' at the end: all that begin so); none =
    certify cannot. `tests`: tests of this repository that hold it, on the CPU with gloo. `figures`:
    where the claim names numbers, those of the checks that stand against them."""

    id: str
    checks: tuple[str, ...]
    tests: tuple[str, ...]
    figures: tuple[str, ...] = ()


CLAIMS = (
    Claim(
        "goes-on",
        ("main path: kill", "main path: growth", "main path: notice", "kill", "growth", "notice"),
        ("tests/e2e/test_scenarios.py", "tests/worker/session/test_peer_recovery.py"),
    ),
    Claim(
        "same-curve",
        ("layout *", "main path: samples", "main path: kill"),
        ("tests/worker/session/test_chain.py", "tests/e2e/test_scenarios.py"),
    ),
    Claim(
        "same-function",
        ("layout *",),
        (
            "tests/foreign/test_foreign_layouts.py",
            "tests/worker/session/test_loss_probe.py",
            "tests/worker/equivalence/test_foreign_chains.py",
        ),
    ),
    Claim(
        "replayed",
        ("main path: replay",),
        ("tests/sim/test_replay.py", "tests/e2e/test_scenarios.py"),
    ),
    Claim("bad-input", (), ("tests/e2e/test_bad_input.py", "tests/config/test_job.py")),
    Claim(
        "verified-checkpoints",
        ("checkpoint",),
        (
            "tests/worker/checkpoint/test_checkpoint_reader.py",
            "tests/worker/checkpoint/test_durable_faults.py",
        ),
    ),
    Claim(
        "script-live",
        ("loop script: notice",),
        ("tests/e2e/test_scripts_made_elastic.py", "tests/worker/loop/test_loop.py"),
    ),
    Claim("trainer", (), ("tests/worker/loop/test_hf_trainer.py",)),
    Claim(
        "script-restarted",
        ("plain script: kill",),
        ("tests/e2e/test_script.py", "tests/policy/test_restarts.py"),
    ),
    Claim("torchrun", ("torchrun",), ("tests/worker/standalone/test_standalone_run.py",)),
    Claim(
        "ray-train",
        ("Ray Train",),
        ("tests/e2e/test_elastic_trainer.py", "tests/cluster/ray_train/test_ray_train_types.py"),
    ),
    Claim("race", (), ("tests/bench/race.py", "tests/bench/test_race.py")),
    Claim(
        "driver-loss",
        ("driver loss",),
        (
            "tests/e2e/test_scenarios.py",
            "tests/e2e/test_driver_loss.py",
            "tests/cluster/backend/test_attach.py",
        ),
    ),
    Claim(
        "pauses",
        ("main path: kill", "main path: growth", "main path: notice"),
        ("tests/bench/recovery.py",),
        ("pause_s", "pause_vs_start"),
    ),
    Claim(
        "hang",
        ("abort *",),
        ("tests/e2e/test_scenarios.py", "tests/worker/process_groups/test_groups.py"),
        ("freed_s",),
    ),
    Claim(
        "unequal",
        (),
        (
            "tests/bench/unequal.py",
            "tests/sim/test_unequal_speeds.py",
            "tests/worker/step/test_shares_set.py",
        ),
    ),
    Claim(
        "sick",
        ("faulty worker: stall", "faulty worker: corrupt", "faulty worker: hang"),
        (
            "tests/bench/sickness.py",
            "tests/e2e/test_scenarios.py",
            "tests/worker/step/test_sdc_check.py",
        ),
        ("pause_s",),
    ),
    Claim(
        "checkpoint-speed",
        ("checkpoint",),
        ("tests/bench/checkpoint.py",),
        ("save_vs_plain", "load_vs_plain"),
    ),
    Claim(
        "move-speed",
        ("reshard",),
        ("tests/bench/reshard.py", "tests/worker/state/test_state_transfer.py"),
        ("rate_vs_bare",),
    ),
    Claim(
        "object-storage",
        ("object storage",),
        (
            "tests/storage/test_s3.py",
            "tests/storage/test_faults.py",
            "tests/storage/test_contract.py",
            "tests/storage/test_cloud_faults.py",
            "tests/e2e/test_object_storage.py",
        ),
    ),
)


@dataclass(frozen=True)
class Stated:
    """A claim in the words of the README."""

    claim: Claim
    text: str


def stated(readme: str, claims: Sequence[Claim] = CLAIMS) -> list[Stated]:
    """The claims in the order of the README. Raises SpecError where marks do not pair, or marks and
    `claims` differ."""
    known = {claim.id: claim for claim in claims}
    found: list[Stated] = []
    open_id, start = "", 0
    for mark in MARK.finditer(readme):
        line = readme.count("\n", 0, mark.start()) + 1
        closes, name = mark.group(1) == "/", mark.group(2) or ""
        if readme[: mark.start()].endswith("\n") and not readme[mark.end() :].startswith("\n"):
            raise SpecError(
                f"README.md, line {line}: {mark.group(0)} begins the line, so it must stand alone "
                "in it"
            )
        if closes == (not open_id) or closes == bool(name):
            raise SpecError(
                f"README.md, line {line}: {mark.group(0)} does not pair; write <!-- claim: ID "
                "-->text<!-- /claim -->"
            )
        if closes:
            found.append(Stated(known[open_id], " ".join(readme[start : mark.start()].split())))
            open_id = ""
            continue
        if name not in known:
            raise SpecError(
                f"README.md, line {line}: claim '{name}' has no row; add it to "
                "elastic/certify/claims.py"
            )
        open_id, start = name, mark.end()
    if open_id:
        raise SpecError(f"README.md: claim '{open_id}' is not closed by <!-- /claim -->")
    ids = [one.claim.id for one in found]
    for claim in claims:
        n = ids.count(claim.id)
        if n != 1:
            raise SpecError(
                f"README.md: claim '{claim.id}' of elastic/certify/claims.py is marked {n} times "
                "there, not once"
            )
    return found
