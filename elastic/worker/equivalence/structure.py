"""Which layouts a program's structure allows, found without values and before anything starts.

The model is followed on the meta device, or with values where it cannot be without. What makes
results depend on which samples stand together closes axes; what pipelines ask besides is looked at
by blocks_in_stages.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastic.errors import ElasticError
from elastic.program import Program
from elastic.types import ModelProfile, coarsest
from elastic.user_frames import told
from elastic.worker.equivalence.blocks_in_stages import BlocksInStages, one_weight
from elastic.worker.equivalence.draw_trial import REAL_MOST_PARAMETERS, try_draws
from elastic.worker.equivalence.forward_trace import (
    FAR,
    INPUT,
    KEYWORDS,
    MORE_OPERATIONS,
    PYTHON,
    Batch,
    Followed,
    Tracer,
    follow,
)  # fmt: skip
from elastic.worker.equivalence.small_copy import whole_model
from elastic.worker.equivalence.stages.groups_in_stages import groups_in_stages
from elastic.worker.parallel.stages.carried_values import carries
from elastic.worker.program.model_profile import block_names, block_of, build_meta, hook_on_weight
from elastic.worker.program.norms.batch_norms import norms_of


@dataclass(frozen=True)
class Structure:
    """Why an axis is closed to a program, '' = its structure allows it; and what a person should
    know of it. `at_once`: a rank must compute all samples of its step in one pass."""

    no_dp: str = ""
    no_tp: str = ""
    no_cp: str = ""
    no_pp: str = ""
    no_ep: str = ""
    no_pp_checkpointing: str = ""
    draws: bool = False
    computes_in: str = ""
    notes: tuple[str, ...] = ()
    at_once: bool = False

    def close(self, profile: ModelProfile) -> ModelProfile:
        """The profile of a model that has this structure."""
        no_tp, no_pp = profile.no_tp or self.no_tp, profile.no_pp or self.no_pp
        return replace(
            profile,
            no_dp=profile.no_dp or self.no_dp,
            no_tp=no_tp,
            no_cp=profile.no_cp or self.no_cp,
            no_pp=no_pp,
            no_ep=profile.no_ep or self.no_ep,
            no_pp_checkpointing=profile.no_pp_checkpointing or self.no_pp_checkpointing,
            tp_limit=1 if no_tp else profile.tp_limit,
            pipeline=profile.pipeline and not no_pp,
            draws=profile.draws or self.draws,
            computes_in=coarsest((profile.computes_in, self.computes_in)),
            notes=(*profile.notes, *self.notes),
            together=0 if self.at_once else profile.together,
        )


def structure_of(program: Program, profile: ModelProfile, batch: Batch) -> Structure:
    """`batch`: of one sample, on the CPU. Raises what the model raises where it cannot be called at
    all."""
    batch, found = _one_or_two(program, profile, batch)
    if isinstance(found, str):
        why = (
            "" if profile.no_pp else f"its forward pass cannot be followed without values: {found}"
        )
        norm, sees = _norm(build_meta(program))
        no_dp = f"{sees}; {_mend(program, norm)}" if norm and not program.batch_dependent else ""
        return Structure(no_dp=no_dp, no_cp=no_dp, no_pp=why)
    device, one, others = found
    shares = _of_shares(program, one, _other(one, others))
    if any(op.where for op in one.draws) or one.python_random:
        trial = try_draws(program, batch)
        why = "draws random numbers, others for each ep; draw before or behind it"
        shares = replace(
            shares,
            no_ep=f"{trial.in_experts} {why}" if trial.in_experts else "",
            draws=bool(trial.problems),
            notes=(*shares.notes, *trial.problems),
        )
    shares = replace(shares, no_dp=shares.no_dp or _shared_by_blocks(program, profile))
    if why := _of_weights(program, one) or _of_numbers(program, batch, device=device, one=one):
        shares = replace(shares, no_dp=why, no_tp=why, no_cp=why, no_pp=why)
    no_pp = profile.no_pp or shares.no_pp
    if not no_pp and profile.n_blocks > 1:
        here = {key: x.to(device) for key, x in batch.items()}
        no_pp = (
            groups_in_stages(program, profile, batch, here=here)
            if carries(program)
            else BlocksInStages(program, profile, here, whole=one).problem()
        )
    missed = "" if profile.n_blocks else _missed_blocks(program)
    return replace(shares, no_pp=no_pp, notes=(*shares.notes, *([missed] if missed else ())))


def _missed_blocks(program: Program) -> str:
    """The default of Program.blocks names none of the model's modules, and there is a list of them
    that look like blocks; '' = there is no such list."""
    if program.blocks != Program.blocks:
        return ""
    for name, module in build_meta(program).named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            alike = len({type(one) for one in module}) == 1
            if name and alike and next(module[0].children(), None) is not None:
                return (
                    f"no module is named like {program.of}blocks='{program.blocks}', so the model "
                    f"is sharded as one piece and has no pipeline stages; blocks='{name}.*' names "
                    f"its {len(module)} {type(module[0]).__name__}"
                )
    return ""


def _one_or_two(
    program: Program, profile: ModelProfile, batch: Batch
) -> tuple[Batch, tuple[str, Followed, list[Followed]] | str]:
    """The passes of one sample, or of two where the model does not take one alone (BatchNorm over
    single values)."""
    try:
        found = _passes(program, profile, batch)
    except ValueError:
        found = ""
    if not isinstance(found, str):
        return batch, found
    two = {key: torch.cat([x, x]) for key, x in batch.items()}
    return two, _passes(program, profile, two)


def _norm(model: nn.Module) -> tuple[str, str]:
    """The first BatchNorm that is left as torch has it, and what is said of it; '' = none."""
    met = {id(norm.module) for norm in norms_of([model])}
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training and id(module) not in met:
            kind = type(module).__name__
            return name, f"{name} is a {kind}: its statistics are those of the samples of one rank"
    return "", ""


def _mend(program: Program, norm: str, *, by_hand: bool = False) -> str:
    groups = f"take batch_norm: {{group: 16}} or step {program.keys}, without microbatch_tokens"
    take = f"{groups}, or GroupNorm, LayerNorm" if norm else "leave that out"
    if by_hand:
        take = "take a module (nn.BatchNorm2d), which is normalized by groups of samples"
    return f"{take}, or say {program.anyway} to train on all the same"


def _passes(
    program: Program, profile: ModelProfile, batch: Batch
) -> tuple[str, Followed, list[Followed]] | str:
    """A pass of the whole model, and others, and the device; truth values that Python asks for are
    others there, and numbers too where the program asks for some. A text: why not."""
    problem = ""
    for device in ("meta", "cpu"):
        if device == "cpu" and (
            profile.n_params > REAL_MOST_PARAMETERS or program.weights is not None
        ):
            return problem
        error: Exception | None = None
        # a guard may raise where a value is true
        for truth in (None, False) if device == "meta" else (None,):
            try:
                one = _pass(program, device, batch, truth=truth)
            except ElasticError:
                raise
            except Exception as raised:  # noqa: BLE001 - the user's model
                error = error or raised
                continue
            return device, one, _others(program, device, batch, one=one)
        assert error is not None
        if device == "cpu":
            raise error
        problem = told(error)
    return problem


def _others(program: Program, device: str, batch: Batch, *, one: Followed) -> list[Followed]:
    """Passes with other values; a model may well refuse a value that it can never have."""
    tries: list[tuple[bool | None, int | None]] = [(None if one.truth is False else False, None)]
    if any(
        op.own and op.name == "a value" and op.labels & {INPUT, KEYWORDS, *one.blocks}
        for op in one.branches
    ):
        tries += [(one.truth, FAR), (one.truth, -FAR)]
    most = 2 * len(one.names) + MORE_OPERATIONS
    others = []
    for truth, far in tries:
        try:
            others.append(_pass(program, device, batch, truth=truth, far=far, most=most))
        except Exception:  # noqa: BLE001 - see above
            continue
    return others


def _other(one: Followed, others: list[Followed]) -> Followed:
    """That which differs most."""
    by_modules = [other for other in others if other.modules != one.modules]
    by_names = [other for other in others if other.names != one.names]
    return next(iter((*by_modules, *by_names, *others)), one)


def _pass(
    program: Program,
    device: str,
    batch: Batch,
    *,
    truth: bool | None,
    far: int | None = None,
    most: int = sys.maxsize,
) -> Followed:
    model = whole_model(program, device)
    given = {key: x.to(device) for key, x in batch.items()}
    return follow(
        program,
        Tracer(program, model, block_names(model, program.blocks), truth=truth, far=far),
        given,
        most_operations=most,
    )


# --------------------------------------------------------------------- what every layout must allow


def _of_shares(program: Program, one: Followed, other: Followed) -> Structure:
    """What makes results depend on which samples stand together, or ranks call different
    modules."""
    notes = []
    no_dp = no_tp = no_cp = no_pp = ""
    norm, sees = _norm(build_meta(program))
    of_samples = {name: any(map(_of_samples, labels)) for name, labels in one.written.items()}
    written = next((name for name, found in of_samples.items() if found), None)
    if not norm and one.norm:
        sees = f"{one.norm}, whose statistics are those of the samples of one rank"
    elif not norm and written is not None:
        sees = f"forward writes the buffer {written} from the samples of one rank"
    if sees and program.batch_dependent:
        notes.append(
            f"{sees}, taken as it is (Program.batch_dependent): losses differ between layouts"
        )
        no_pp = (
            "a pipeline stage is first called with made-up values, and "
            f"{sees.replace(':', ',', 1)}; take pp=1"
        )
    elif sees:
        no_dp = no_cp = no_pp = f"{sees}; {_mend(program, norm, by_hand=bool(one.norm))}"
    chosen = [op for op in one.branches if any(map(_of_samples, op.labels))]
    mine = [op for op in chosen if op.own]
    if one.python_random:
        no_dp = no_tp = no_cp = (
            f"forward draws from {one.python_random}, which gives other numbers on each rank; "
            "draw with torch instead"
        )
    if one.modules != other.modules:
        no_dp = no_cp = _branch(one, other)
        no_tp = no_dp if one.python_random else no_tp
    elif mine and one.names != other.names and not program.batch_dependent:
        place = f"{mine[0].inside or 'forward'} ({mine[0].where})"
        no_dp = no_cp = no_pp = (
            f"{place} branches on a value of the whole batch, which each rank and microbatch sees "
            "a part of: compute both and choose for each sample with torch.where, or say "
            f"{program.anyway} to train on all the same"
        )
    elif chosen and one.names != other.names:
        notes.append(
            f"{chosen[0].inside or 'forward'} ({chosen[0].where}) branches on a value of the "
            "samples of one rank"
        )
    alike = [name for name, found in of_samples.items() if not found and not norm]
    if alike and program.batch_dependent:
        more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
        notes.append(
            f"each forward pass writes the buffer {alike[0]}{more}: how many there are in a step "
            "depends on the layout"
        )
    if one.keeps:
        more = f" (and {len(one.keeps) - 1} more)" if len(one.keeps) > 1 else ""
        notes.append(
            f"{one.keeps[0]}{more} keeps a value of the samples of one rank: if a later pass "
            "reads it, layouts differ"
        )
    # BatchNorm by micro-batches is what the job asks for
    at_once = bool(no_dp) and not norm and not one.python_random
    return Structure(
        no_dp, no_tp, no_cp, no_pp, computes_in=one.computes_in, notes=tuple(notes),
        at_once=at_once,
    )  # fmt: skip


def _of_samples(label: str) -> bool:
    return not label.startswith("the weight ")


def _of_weights(program: Program, one: Followed) -> str:
    """What is done to weights that only a whole model has."""
    model = build_meta(program)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name} has sparse gradients, which cannot be cut: take sparse=False"
    if hook := hook_on_weight(model):
        return hook
    for name, where in one.weights_written.items():
        at = f" ({where})" if where else ""
        return (
            f"forward writes the weight {name}{at}: what it writes is lost where the weight is "
            "cut; compute a value from the weight and use that"
        )
    return ""


def _of_numbers(program: Program, batch: Batch, *, device: str, one: Followed) -> str:
    """A number of Python that each pass changes, as no cache does that the first one fills."""
    if not one.numbers:
        return ""
    model = whole_model(program, device)
    seen = []
    for _ in range(2):
        tracer = Tracer(program, model, block_names(model, program.blocks), truth=one.truth)
        again = follow(program, tracer, {key: x.to(device) for key, x in batch.items()})
        seen.append({*again.numbers})
    counts = [name for name in one.numbers if name in seen[0] & seen[1]]
    if not counts:
        return ""
    more = f" (and {len(counts) - 1} more)" if len(counts) > 1 else ""
    name = counts[0].rpartition(".")[2].removesuffix(")").removeprefix("len(")
    return (
        f"each forward pass changes the number {counts[0]}{more}, which no checkpoint has and no "
        f"new worker gets: make it a buffer, self.register_buffer('{name}', torch.zeros(())), "
        "which is moved and stored"
    )


def _shared_by_blocks(program: Program, profile: ModelProfile) -> str:
    """FSDP shards each block by itself, and one weight once."""
    if not isinstance(program.blocks, str):
        blocks = block_names(build_meta(program), program.blocks)
        # -1 where a tensor is on a block's stage and no part of it
        held = [block_of(spec.fqn, blocks) for spec in profile.specs]
        specs = tuple(
            replace(spec, block=-1 if block is None else block)
            for spec, block in zip(profile.specs, held, strict=True)
        )
        profile = replace(profile, specs=specs)
    if (names := one_weight(profile)) is None:
        return ""
    return (
        f"{names[0]} and {names[1]} are one weight in two blocks, and FSDP shards each block by "
        f"itself: put it outside of the blocks, or choose {program.of}blocks so that one block "
        "holds both"
    )


def _branch(one: Followed, other: Followed) -> str:
    """Ranks that see other values call other modules, and wait for each other's parameters."""
    first = next((op for op in (*one.branches, *other.branches)), None)
    more = sorted({*one.modules} ^ {*other.modules})
    what = f"whether {more[0]} is called" if more else f"how often {one.modules[-1]} is called"
    if first is None:
        source = one.python_random or other.python_random or PYTHON
        return (
            f"{what} depends on {source}, which draws other numbers on each rank; the ranks would "
            "wait for each other's weights: multiply by a mask that is 0 instead"
        )
    return (
        f"{what} depends on a value ({first.where}) that ranks see differently; they would wait "
        "for each other's weights: compute both and choose with torch.where"
    )
