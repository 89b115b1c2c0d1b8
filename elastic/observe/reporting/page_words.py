"""Plain words for what a report tells somebody who does not train models."""

from __future__ import annotations

# category of the ledger -> its name on the page, and what it is
CATEGORIES = {
    "productive": ("Training that counts", "steps whose result was kept"),
    "program_startup": ("Starting up", "machines boot, programs load, first steps are prepared"),
    "data_loading": ("Waiting for data", "the next samples had not been read yet"),
    "evaluation": ("Validation", "the model was tested on samples that it does not train on"),
    "copy": ("Copies in memory", "the state was copied to other machines, against losses"),
    "checkpoint_save": ("Saving", "training waited while the state went to storage"),
    "checkpoint_restore": ("Reading back", "the state was read from storage after a loss"),
    "reshard": ("Dividing the work anew", "machines came or left, and the others took over"),
    "wasted_progress": ("Work done twice", "steps that a loss undid"),
    "waiting_for_capacity": ("Waiting for machines", "too few of them were there to train"),
    "idle_remainder": ("Machines without work", "ready, but the work could not be divided so"),
    "between_steps": ("Between two steps", "reports and the like"),
    "head_node": ("The machine that steers", "it trains nothing itself"),
    "not_running": ("Not running", "stopped or interrupted; nothing was paid"),
    "other": ("Other", "machines that were leaving, and what fits nowhere else"),
}

# axis of a layout -> what goes over it
AXES = {
    "dp_shard": "parts of the model are gathered before they are used, gradients added up",
    "dp_replicate": "copies of the model add up what they have learned",
    "tp": "GPUs that compute one layer together exchange what each has of it",
    "cp": "GPUs that share one long text exchange what the others must know of it",
    "ep": "words are sent to the experts for them, which lie on other GPUs, and back",
    "pp": "layers on one GPU hand their results to the next",
    "all axes": "the end of each step, which all agree on",
}

CAUSES = {
    "start": "start",
    "notice": "machine announced to be taken back",
    "loss": "machine lost without warning",
    "growth": "machine joined",
    "release": "machine given up",
    "rebalance": "work divided by measured speeds",
    "infeasible": "memory was too small",
    "rollback": "return to an earlier state",
    "phase": "next phase of the job",
}

SOURCES = {
    "fresh": "begun anew",
    "live": "memory of the running machines",
    "peer": "copy in another machine's memory",
    "durable": "checkpoint in storage",
}

PHASES = {
    "detect": "noticing",
    "quiesce": "coming to a stop",
    "groups": "connecting",
    "build": "building the model",
    "transfer": "moving the state",
    "probe": "checking the result",
    "first_step": "first step",
}

# what a run is bound by -> in plain words
BOUNDS = {
    "compute": "The steps compute nearly all the time: faster or more GPUs are what is left.",
    "memory bandwidth": "GPUs spend more time moving numbers in their memory than computing.",
    "network": "Machines wait for each other's messages.",
    "storage": "Saving and reading the state takes noticeable time.",
    "data": "GPUs wait for the next samples to be read.",
    "imbalance": "Some workers have more to do than others, which wait for them.",
    "pipeline bubble": "The model is cut into stages, and stages wait while the line fills up.",
    "heat or power": "A GPU slows itself down because it is hot or short of power.",
    "waiting for capacity": "Too few machines were there to train.",
    "idle nodes": "Machines were paid for that had no part in the work.",
    "copies": "Copies against losses slow the training down.",
    "changes of capacity": "Each machine that joins or leaves interrupts the training.",
    "start-up": "A large part of the time went into getting started.",
    "evaluation": "Testing the model takes a large part of the time.",
    "time between steps": "The steps are so short that what happens between them counts.",
}

GLOSSARY = (
    ("Step", "The smallest unit of training: the model sees one batch of samples and is adjusted "
     "once."),
    ("Token, sample", "What the model reads: a piece of a word, or one whole example."),
    ("Loss", "How wrong the model is on average; training makes it smaller. Validation loss is "
     "measured on samples that are not trained on."),
    ("GPU, worker", "The processor that does the training. Where a run uses ordinary processors, "
     "a worker is one process on them."),
    ("GPU-hour, GPU-second", "One GPU that is paid for during one hour or second, whether it works "
     "or not."),
    ("Goodput", "The share of all paid GPU time that went into training that counts."),
    ("Spot machine", "Rented at a discount; the cloud may take it back at any time, with a short "
     "notice or none."),
    ("On-demand machine", "Rented at the full price, and not taken back."),
    ("Checkpoint", "The whole state of the training, saved in storage."),
    ("Layout", "How the work is divided among the GPUs: dp = each has samples of its own, tp = one "
     "calculation is shared, pp = the model is cut into stages."),
    ("Pool", "A kind of machine that the run may rent, with its price."),
)  # fmt: skip
