"""What a driver decides by that drivers before it did not: a gate for each such rule, so that the
journal of an older driver replays as it was decided.

A new rule is a line here. A driver of today writes all of them as True into DriverStarted, but for
those that cannot hold where it drives (GATES in restarted_script.py, standalone_run.py); the state
has them from there, and what the journal of an older driver does not name is False.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gates:
    """`else`: what a driver without the rule does."""

    # groups of an announced change are made while the generation before it trains
    forms_ahead: bool = False
    # a step of a plan is expected to take what steps of such plans took in this run, else as the
    # newest one, scaled
    expects_measured: bool = False
    # on-demand nodes stand in for spot when the slack of the deadline is spent, else at even
    # progress; reclaims that come at once count as one, else each by itself; pools are compared by
    # the price of what they compute, else by that of a GPU
    spends_slack: bool = False
    # the wish of a spent budget to stop is as old as what it comes of, else as new as each look
    dates_budget: bool = False
    # processes that die one after another while no step is done end the run, else nodes are
    # replaced for ever
    bounds_deaths: bool = False
    # what only memory holds when a run is to stop is saved in whatever layout the nodes that are
    # there can enter, else in one that the job allows
    saves_in_any: bool = False
    # of nodes that reach the driver and not each other some are left out, else attempts to meet end
    # the run
    leaves_out: bool = False
    # a run that stores checkpoints and has lost its state before the first one begins anew,
    # whatever that costs, else it ends, where that is much
    begins_anew: bool = False
    # the checkpoint of the last step is tried for `orphan_lease_s`, else a few times
    waits_to_save: bool = False
    # a step that breaks again and again, while those before it are redone each time, ends the run,
    # else its nodes are quarantined
    blames_program: bool = False
    # the checkpoint of a stop is tried as far as budget and deadline allow, else the run ends at
    # the first one that is refused
    saves_again: bool = False
    # on-demand nodes that were to be left for spot and train on count as others do, and what a plan
    # takes in is not released, else they are left as soon as any other node is prepared, which may
    # be released at once
    keeps_left: bool = False
    # a process that dies on a node with a notice is not counted by `bounds_deaths`, else it is
    spares_noticed: bool = False
    # a node that is being left or released and is in fact taken counts as taken, else as released
    counts_taken: bool = False
    # an axis that a transition of this run has compared, and found right, is not avoided where
    # nothing can be compared, else it is
    trusts_compared: bool = False
    # where no older copy would tell either, a short run begins anew
    redoes_unknown: bool = False
    # a failed device is known also where who said so was taken for gone
    heeds_dead: bool = False
    # nothing that is heard while the last order waits for storage begins an ended run again, else a
    # plan that is entered then does
    stays_ended: bool = False
    # on-demand nodes for the deadline are asked for beside spot nodes that start, else these take
    # their room; patience with a request lasts until a node of it is prepared, else until one comes
    asks_beside: bool = False
    # a node that is there behind its deadline when a driver comes has none, else it has
    outlives_notice: bool = False
    # a request is not withdrawn for a slow start while machines of the pool are seen to start: what
    # buys them says when they do not join; else it is, and they are paid in vain
    waits_for_started: bool = False
    # machines that were released and have not ended count for `max_nodes`, else they do not
    counts_leaving: bool = False
    # a run that is about to end withdraws its requests and releases nodes that hold nothing, else
    # both stay until it has ended
    withdraws_at_end: bool = False
    # a node is not asked for, nor taken in, so late that the run ends before that has paid, else
    # only the budget and the last step bound it
    weighs_rest: bool = False
    # starts that a reclaim ends are bounded like others, also of a spot pool whose nodes have been
    # prepared, and where the node had a notice; else such nodes are asked for at once, for ever
    bounds_reclaims: bool = False
    # machines that start count for the budget also where no request of theirs is open, else not
    counts_starting: bool = False
    # a validation loss that is not finite counts, as the worst; what a checkpoint that is there is
    # judged by stays known; else such a checkpoint is judged by the evaluation before, and an old
    # one by none
    scores_all: bool = False
    # all checkpoints that there are are judged by what is to stay, else the newest 100
    judges_all: bool = False
    # an error that the program raises while a node is prepared is that node's, where others have
    # opened the program, else it ends the run
    spares_the_rest: bool = False
    # a run whose last steps are lost before they are stored ends at its deadline, else it waits on
    ends_undone: bool = False
    # a reservation that ends before the deadline is not counted among what does the rest of the
    # work, else it is
    heeds_ends: bool = False
    # a checkpoint is taken out of turn where doing again what is not stored would take much of the
    # slack of the deadline, else the cadence alone says when
    saves_in_time: bool = False
    # what a step takes on all on-demand nodes follows from the plans that were measured, else from
    # the steps so far, in proportion
    heeds_scaling: bool = False
    # once the slack of the deadline bears no further reclaim, spot nodes are asked for only where
    # the on-demand pools say no, are too dear or miss the deadline alone, else whenever the job can
    # use more
    spares_last: bool = False
    # that a person has asked the run to stop holds for the drivers that a supervisor starts, until
    # it has stopped, else for the driver that heard it
    keeps_stop: bool = False
    # a node that was quarantined is not used for a time that grows, whatever the reason was, and is
    # released should it come back before; else only one that others did not reach, which waits
    keeps_out: bool = False
    # a quarantined node is released where the driver before has not come to that, else never
    ends_quarantined: bool = False
    # nodes that are prepared so late that the pause which takes them in would not pay are released,
    # else they are kept to the end
    releases_late: bool = False
    # of checkpoints of one validation loss that of the step which was validated is the best, else
    # the newest
    keeps_validated: bool = False
    # what a checkpoint takes is longer where fewer ranks write it than wrote those before, else it
    # is what these took
    scales_saves: bool = False
    # the checkpoint of the last step is waited for as long as its upload may take, and one that is
    # late is one that failed; else for two minutes, and then it is an error of the infrastructure
    awaits_last: bool = False
    # the checkpoint of a person's stop is waited for as long as that of the last step, while memory
    # alone holds its step and no limit is reached; else for a minute, or three times what those
    # before took
    awaits_stop: bool = False
    # a node that was to be left, holds nothing of the state and is taken in by a plan is not
    # released by the same decision, else it is
    keeps_taken: bool = False
    # storage that does not answer who reads data, or a checkpoint, is waited for as long as that
    # lasts, one that refuses for `orphan_lease_s`, and what one node alone cannot read is held
    # against it; else each of these ends the run behind a few attempts
    awaits_data: bool = False
    # that memory gave out counts also where peers had told before that they had lost that worker,
    # else the layout is retried; unequal shares that do not fit on several ranks leave it usable,
    # else those on one
    heeds_memory: bool = False
    # a generation is entered for as long as its workers make progress with their state, else for
    # ten minutes
    heeds_loading: bool = False
    # a node that is short of memory more than three times in a row is left, however long each
    # attempt takes, else only where that happens within an hour
    counts_short: bool = False
    # checkpoints of a generation whose content was found wrong are removed, else they stay, valid
    removes_distrusted: bool = False
    # a checkpoint that is known to be damaged is so for the next driver too, unless none but such
    # are left to resume from; else that one takes it for good
    remembers_damage: bool = False
    # damaged checkpoints are removed where there is a `storage_quota_gb`, for which they count, and
    # others are there, else they stay, and later ones may not fit
    frees_damaged: bool = False
    # nodes that start for a request that has failed count as coming until what buys them says that
    # they do not join, else they are forgotten, and asked for a second time
    expects_started: bool = False
    # a driver that begins where another has ended knows what steps took also where prices have
    # changed since the first one, else only where none has
    keeps_measured: bool = False
    # a layout that did not fit is tried on GPUs with more memory than those had, which are asked
    # for where it fits no others, else on none
    tries_larger: bool = False
    # nodes that are paid for and that no plan will use are released whatever the run is to be, and
    # not where others are about to leave, else where it is to be cheap
    releases_spare: bool = False
    # processes that die on one node end the run as well, where it was quarantined between two of
    # them and there are no others, else it is tried again for ever
    bounds_alone: bool = False
    # a run that has done a step bears a network that fails for some minutes, however often it is
    # tried within them, else five attempts
    outlasts_breaks: bool = False
    # a node that was quarantined since processes died on it is tried again when it may be used, and
    # quarantined at the next death, else before it is tried, for as long as these are of that hour
    tries_again: bool = False


NAMES = tuple(one.name for one in fields(Gates))


def newest_gates(**others: bool) -> dict[str, Any]:
    """As a driver of today has them, but for `others`."""
    return dict.fromkeys(NAMES, True) | others


def gates_of(one: Gates) -> dict[str, Any]:
    return {name: getattr(one, name) for name in NAMES}
