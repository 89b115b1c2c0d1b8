"""What must stay the same for a run to continue along the same curve: the program's code, its data,
the job's mathematics.

Plain data: it stands in the journal (DriverStarted.job) and in every checkpoint.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from hashlib import scrypt, sha256
from pathlib import Path
from typing import Any

from elastic.config.masking import STARS, masked
from elastic.types import Job, ModelProfile
from elastic.version import PACKAGE

JOB_KEYS = (
    "global_batch", "seed", "clip_grad_norm", "precision", "reduce_dtype", "float8", "args",
    "lr_schedule", "lr_scaling", "base_global_batch", "batch_norm", "phases",
)  # fmt: skip
KEY = "fingerprint"  # in DriverStarted.job and in a checkpoint's meta


def fingerprint(
    program: str | Path, job: Job, model: ModelProfile, *, n_samples: int | None
) -> dict[str, Any]:
    """`n_samples`: length of the dataset, None = not known here. It holds no secret of the job, but
    tells another one."""
    keys = job.plain()
    found = {
        "program": code_digest(Path(program)),
        "n_samples": n_samples,
        "data.train": job.data.train,
        **{key: keys[key] for key in JOB_KEYS},
        "the steps in which lr_schedule falls": _decay(job),
        "settings of the optimizer": job.optimizer,
        "optimizer": _digest(repr(_kept(model))),
        "optimizers": _split(model),
        "tensors": _digest(
            repr(
                sorted((s.fqn, s.shape, s.dtype, s.trainable, s.tied_to or "") for s in model.specs)
            )
        ),
    }
    return _without_secrets(found, found)


def _without_secrets(mark: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    """A digest in the place of each secret, slow to compute for who tries many; `of`: the salt
    follows from what no run changes in this mark."""
    salt = f"{of.get('tensors')} {of.get('seed')}"

    return dict(
        masked(dict(mark), lambda name, secret: STARS + _slow_digest(secret, f"{salt} {name}"))
    )


@cache
def _slow_digest(secret: str, salt: str) -> str:
    return scrypt(secret.encode(), salt=salt.encode(), n=2**14, r=8, p=1, dklen=4).hex()


def differences(was: Mapping[str, Any], now: Mapping[str, Any], *, file: str = "program.py") -> str:
    """In one line, without secrets; '' = none. `file`: what the program stands in, by name. What
    only one of the two knows is not compared. What was recorded as "***" may have been anything,
    and secrets that were recorded as they are compare with their digests."""
    words = {
        "program": f"the code of its {file}",
        "optimizer": "what its optimizer keeps",
        "optimizers": "which optimizer has which parameters",
        "tensors": "names, shapes or dtypes of tensors",
    }
    found = []
    was, now = _without_secrets(was, now), _without_secrets(now, now)
    if was:  # runs of versions without phases had none
        was = {"phases": [], **was}
    for key, old in was.items():
        new = now.get(key)
        if key not in now or _same(old, new) or (key == "n_samples" and None in (old, new)):
            continue
        found.append(
            words.get(key)
            or f"{'samples in the dataset' if key == 'n_samples' else key} ({old}, now {new})"
        )
    return ", ".join(found)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(
            _same(value, new[key]) for key, value in old.items()
        )
    return old == new or (old == STARS and isinstance(new, str))


def batch_changed(run: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Why the run cannot continue with another batch, in one line; '' = it has the same. Its steps
    are counted in batches: step s has the samples from s * global_batch on, so another batch would
    read some twice and others never."""
    old, new = was.get("global_batch"), now.get("global_batch")
    if old is None or new is None or old == new:
        return ""
    return (
        f"run '{run}' was started with global_batch={old}, the job says {new}: the place in the "
        "data is counted in batches, so that cannot change within a run; change it back, or "
        "begin a new run with this one's state (elastic checkpoint import URI --into NAME --job "
        "JOB), where lr_scaling holds from its start"
    )


def _decay(job: Job) -> str | None:
    """It follows from `steps` where the schedule does not say itself where it ends."""
    if job.lr_schedule is None or job.lr_schedule.kind == "constant":
        return None
    begin, length = job.lr_schedule.decay(job.steps)
    return f"{begin} to {begin + length}"


def code_digest(program: Path) -> str:
    """Of the syntax tree: comments and layout may change."""
    try:
        return _digest(ast.dump(ast.parse(program.read_text())))
    except (SyntaxError, ValueError):
        return _digest(program.read_text())


def _kept(model: ModelProfile) -> Any:
    kept = sorted(
        {(one.entries, one.scalars, *((one.form,) if one.form else ())) for one in model.optimizers}
    )
    return kept if len(kept) > 1 else (*kept, ((), ()))[0]


def _split(model: ModelProfile) -> str | None:
    """Which parameters go together, whatever their optimizer is called; None = all of them."""
    names = {kept.name for kept in model.optimizers}
    if len(names) < 2:
        return None
    trained = [spec for spec in model.specs if spec.trainable and not spec.buffer]
    return _digest(
        repr(
            sorted(
                sorted(s.fqn for s in trained if model.kept_of(s).name == name) for name in names
            )
        )
    )


def digest_of_file(path: Path) -> str:
    """Of its bytes; '' = it cannot be read."""
    try:
        return sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


@cache
def digest_of_code(*places: str) -> str:
    """Of all code in these folders of this package, or in these files."""
    files = sorted(
        file
        for place in places
        for file in (
            [PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py")
        )
    )
    return _digest("".join(map(digest_of_file, files)))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
