"""The scenarios: what is promised of a run, one entry each.

`elastic certify` plays them where it is started, tests/e2e/test_scenarios.py plays all of them.
"""

from __future__ import annotations

from elastic.scenarios.scenario import Act, Nodes, Scenario, Strike

# the node is left at once: a first transition is given 13 s and two steps
SOON = "deadline_s=12"
# a stalled rank is named after 10 s
STALL_MOST_S, DEVICE_MOST_S = 40.0, 30.0
FOUR = Nodes(4, {4: "dp_shard=2,tp=2", 3: "dp_shard=3", 2: "dp_shard=2", 1: "dp_shard=1"})

MAIN_PATH = Scenario(
    "main path",
    "When a node is killed, added or announced to leave, the processes that remain continue within "
    "the same run, in a new layout, with the state taken from memory.",
    (
        Act("main path: kill", "kill=any-spot", "loss"),
        Act("main path: growth", "add=spot", "growth", back=True),
        Act("main path: notice", f"notice=any-spot {SOON}", "notice"),
    ),
    Nodes(2, {3: "dp_shard=3", 2: "tp=2", 1: "dp_shard=1"}, on_demand=1),
    anywhere=True,
)
AXES = Scenario(
    "several axes",
    "A node with a GPU that fails is left behind and quarantined, rank 0's node is killed: between "
    "layouts of all axes.",
    (
        Act(
            "several axes: failed GPU",
            "device_error=rank:3 gpu=1 place=backward",
            "loss",
            pause_most_s=DEVICE_MOST_S,
        ),
        Act("several axes: kill of rank 0", "kill=rank0", "loss"),
    ),
    Nodes(2, {6: "dp_shard=3,tp=2", 4: "pp=2,dp_shard=2", 2: "dp_shard=2"}, on_demand=1, workers=2),
    also=("growth",),
)
FAULTY = Scenario(
    "faulty worker",
    "A rank that stalls though its process answers, while a checkpoint has begun and results are "
    "compared, is named and left behind; so is one whose results are silently corrupt (the steps "
    "since the last comparison are done again), and one that is stopped.",
    (
        Act("faulty worker: stall", "stall=rank:0 gpu=0", "loss", pause_most_s=STALL_MOST_S),
        # awaited: a transition with corrupt results would be found out by its own checks
        Act("faulty worker: stalled one replaced", "", "growth", back=True),
        Act("faulty worker: corrupt", "corrupt=rank:2 gpu=0", "rollback"),
        Act("faulty worker: corrupt one replaced", "", "growth", back=True),
        Act("faulty worker: hang", "hang=any-spot", "loss", pause_most_s=STALL_MOST_S),
    ),
    FOUR,
    {"check_numbers_every": 10, "durable_every": 10},
    also=("growth",),
    least_s=90.0,
)
WORST_MOMENTS = Scenario(
    "worst moments",
    "A worker is killed while a loss is repaired, one that has just been told to join, and one "
    "that has just been told to send what it holds: with two replicas of each box nothing is read "
    "from disk.",
    (
        Act(
            "worst moments: loss in a loss", "kill=rank:3", "loss", strike=Strike("loss", "second")
        ),
        # the process that was struck comes back on its node, within that transition or behind it;
        # the next act waits for that, or its growth might come between the notice and the plan
        Act(
            "worst moments: newcomer",
            "add=spot",
            "loss",
            back=True,
            strike=Strike("growth", "newcomer"),
        ),
        Act(
            "worst moments: sender",
            "notice=rank:1 deadline_s=5",
            "loss",
            strike=Strike("notice", "sender"),
        ),
    ),
    Nodes(3, {n: f"dp_shard={n}" for n in (4, 3, 2, 1)}, on_demand=1),
    {"peer_copies": 2},
    also=("growth",),
)
CUT_OFF = Scenario(
    "cut off",
    "A node that neither the driver nor its peers nor storage can reach is given up, what it still "
    "does counts for nothing, and afterwards it takes part again.",
    (
        Act("cut off: partition", "partition=any-spot for_s=8", "loss", pause_most_s=STALL_MOST_S),
        Act("cut off: taken back", "", "growth", back=True),
    ),
    Nodes(3, {3: "dp_shard=3", 2: "dp_shard=2"}),
    whole=True,
)
NO_ROOM = Scenario(
    "no room",
    "A layout that does not fit into memory gives way to the next one.",
    (Act("no room: layout", "", "infeasible"),),
    Nodes(2, {4: "dp_shard=2,tp=2"}, workers=2),
    program="small_memory",
    also=("infeasible",),
    whole=True,
)
WRONG_LAYOUT = Scenario(
    "wrong layout",
    "A layout that computes another function is left without a step, and its axis is not used any "
    "more.",
    (Act("wrong layout: notice", f"wrong_layout=true; notice=any-spot {SOON}", "rollback"),),
    Nodes(2, {6: "dp_shard=6", 4: "pp=2,dp_shard=2"}, on_demand=1, workers=2),
    also=("notice", "rollback"),
    whole=True,
)
LOOP_SCRIPT = Scenario(
    "loop script",
    "A script that enters elastic.loop is changed live; its workers outlive a driver that dies, "
    "and the next one finds them.",
    (
        Act("driver loss", "kill_driver=true", "none"),
        Act("loop script: notice", f"notice=any {SOON}", "notice"),
    ),
    Nodes(2, {}),
    # should the driver not come back, the workers leave a user's cluster after this
    {"orphan_lease_s": 120.0},
    script="loop_script",
    on_cluster=True,
    anywhere=True,
    least_s=45.0,
)
STALLS = tuple(
    Scenario(
        f"stalled rank {rank}",
        "One GPU of a node stalls: the rank is named, whichever it is, and its node left behind.",
        (
            Act(
                f"stalled rank {rank}: stall",
                f"stall=rank:{rank} gpu={rank % 2}",
                "loss",
                pause_most_s=STALL_MOST_S,
            ),
        ),
        Nodes(2, {6: "dp_shard=3,tp=2", 5: "dp_shard=5", 4: "dp_shard=4"}, on_demand=1, workers=2),
        also=("growth",),
        whole=True,
    )
    for rank in (3, 4)
)
SCENARIOS = (
    MAIN_PATH,
    LOOP_SCRIPT,
    AXES,
    FAULTY,
    WORST_MOMENTS,
    NO_ROOM,
    CUT_OFF,
    WRONG_LAYOUT,
    *STALLS,
)
