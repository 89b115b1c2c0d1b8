"""What the planner knows of a model and of the hardware: numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from elastic.types.nouns import Layout


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor of the training state.

    `tp_dim`: the dimension that tensor parallelism cuts, None = replicated over tp. `block`: index
    of the model block that it belongs to, -1 = before the blocks (first stage), n_blocks = after
    them (last stage), None = on every rank (step, RNG). `tied_to`: fqn of the tensor (named
    earlier) that it shares its memory with. Only trainable tensors have optimizer state; buffers
    are never cut. `reread`: no part of the training state; who needs it reads it from the program's
    weights. `optimizer`: index in ModelProfile.optimizers of the one that trains it. `by_expert`:
    dimension 0 counts experts, which ep divides. `attributes`: what the model has set on the
    parameter (a factor of its learning rate), by name.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    tp_dim: int | None = None
    block: int | None = None
    tied_to: str | None = None
    trainable: bool = True
    buffer: bool = False
    reread: bool = False
    optimizer: int = 0
    by_expert: bool = False
    attributes: tuple[tuple[str, bool | int | float | str], ...] = ()


@dataclass(frozen=True)
class OwnedEntry:
    """A tensor of any shape that only the owner of a parameter holds. `on_host`: in host memory,
    wherever the parameter is."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    on_host: bool = False


@dataclass(frozen=True)
class OptimizerSpec:
    """What an optimizer keeps for each of its parameters. `entries`: those of the parameter's
    shape; `scalars`: single numbers; `first`: those that do not begin as 0, and what they begin as;
    `name`: among several optimizers of a program.

    One that steps whole tensors at their owners has `owned` instead, of parameters of one shape,
    and `form`: how the owner's state is built of these ('' = element-wise). `flop`: of its step for
    one of them.

    `counters`: what its steps change beside the state of parameters (`group.step`, `self.n`,
    `state.k`)."""

    entries: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    first: tuple[tuple[str, float], ...] = ()
    name: str = ""
    owned: tuple[OwnedEntry, ...] = ()
    form: str = ""
    flop: float = 0.0
    counters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matmul:
    """Products [rows, k] x [k, n] of one sample's forward pass, `count` of them in a mean block.
    `cut`: the dimension that tp divides, `n` (colwise), `k` (rowwise) or '' (neither). `experts`:
    over so many matrices the rows are spread, each rank of ep has its share of them; 0 = one matrix
    takes all rows."""

    rows: int
    k: int
    n: int
    count: float = 1.0
    cut: str = ""
    experts: int = 0

    @property
    def flop(self) -> float:
        """Of one of them."""
        return 2.0 * self.rows * self.k * self.n


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention of one sample, `count` times in a mean block. `window`: keys
    that a query sees at most, 0 = all (half of them under `causal`). tp divides the heads, cp the
    queries."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int = 0
    count: float = 1.0

    @property
    def flop(self) -> float:
        """Of one of them, forward: queries x keys and their weights x values, masked scores left
        out."""
        seen = min(self.keys, self.window) if self.window else self.keys / (2 if self.causal else 1)
        return 4.0 * self.queries * seen * self.heads * self.head_dim


@dataclass(frozen=True)
class SampleProfile:
    """What one sample asks of a model, found by running it on the meta device in the job's
    `precision`. Bytes are of one sample on a rank that has the whole model.

    `sequence`: dim 1 of the model's input, 0 = it has none. `no_cp`: why that cannot be cut over
    ranks, '' = it can. `sequence_parallel`: between the modules that tp cuts, a rank has a part of
    the sequence. `loss_parallel`: logits stay cut over tp for the loss. `kept_bytes`: what a block,
    on average, keeps for its backward pass under each activation_checkpointing. `hidden_bytes`:
    what a block is called with. `key_value_bytes`: keys and values of a block's attention.
    `ends_bytes`: what is kept outside of the blocks, with the model's output, its gradient and what
    the loss keeps.

    `matmuls`, `attentions`: of a mean block's forward pass; `ends_matmuls`: outside of the blocks.
    `moved_bytes`: what all other operations of a mean block read and write in the forward pass,
    `n_ops` of them; `ends_moved_bytes`: those outside of the blocks, with the loss. `tokens`: what
    throughput is counted in, 0 = samples. `block_flop`, `block_moved_bytes`: of each block, forward
    and backward as far as it has gradients; () = all blocks ask the same.
    """

    flop: float  # of forward and backward pass, attention included, nothing computed twice
    kept_bytes: tuple[tuple[str, int], ...]
    hidden_bytes: int
    ends_bytes: int
    sequence: int = 0
    key_value_bytes: int = 0
    no_cp: str = ""
    sequence_parallel: bool = False
    loss_parallel: bool = False
    matmuls: tuple[Matmul, ...] = ()
    attentions: tuple[Attention, ...] = ()
    ends_matmuls: tuple[Matmul, ...] = ()
    moved_bytes: int = 0
    ends_moved_bytes: int = 0
    n_ops: int = 0
    tokens: int = 0
    block_flop: tuple[float, ...] = ()
    block_moved_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class UnitFlow:
    """A module of a program with several groups of blocks: a block, or one outside of them that has
    tensors. It runs on the stage of the block `place` (-1 = the first stage, the number of blocks =
    the last one) and is called with what the units `needs` gave. `shape`: of what it gives, for one
    sample; `batched`: does dim 0 count samples? The unit '' is the model itself: what its output is
    made from."""

    name: str
    place: int
    needs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    batched: bool = True

    def shape_of(self, n_rows: int) -> tuple[int, ...]:
        """For so many samples."""
        return (n_rows, *self.shape[1:]) if self.batched else self.shape


@dataclass(frozen=True)
class ModelProfile:
    """What the planner knows of a model. `specs` are parameters and buffers, without optimizer
    state.

    `no_dp`, `no_tp`, `no_cp`, `no_pp`, `no_ep`: why no layout with more than one rank on that axis
    computes what the whole model does, in one line that names the place and the mend; '' = nothing
    is known against it. `no_pp_checkpointing`: why blocks may not be computed again in the
    backward pass on pipeline stages. `pipeline` is False where `no_pp` says
    why, and `tp_limit` is 1 where `no_tp` does.
    `notes`: what a person should know of the model before it trains, a line each. `draws`: it
    draws random numbers that cannot be keyed, so that a step that is done again may differ.
    `computes_in`: the type of fewest bits that its forward pass makes numbers of, '' = float32.
    `proven`: axes for which loss and gradients of a small copy were found equal to those of one
    process. `together`: so many consecutive samples of a step are computed in one go, 0 = all that
    a rank has of it (BatchNorm). `flow`: of a program with several groups of blocks, in a worker:
    what pipeline stages hand on.
    """

    n_blocks: int
    n_params: int
    specs: tuple[TensorSpec, ...]
    optimizers: tuple[OptimizerSpec, ...] = ()
    flop_per_token: float = 0.0
    tp_limit: int = 1  # largest tp that the model's plan and shapes allow (1 = no tp plan)
    # boxes of the program's extra_state, under their names in the training state
    extra: tuple[TensorSpec, ...] = ()
    pipeline: bool = True  # may the blocks be spread over pipeline stages?
    n_expert_params: int = 0  # of n_params, those of experts
    n_experts: int = 0  # ep must divide it; 0 = there are none that ranks can have a share of
    # None = not known (yet): the first node that is prepared tells it
    sample: SampleProfile | None = None
    no_dp: str = ""
    no_tp: str = ""
    no_cp: str = ""
    no_pp: str = ""
    no_ep: str = ""
    no_pp_checkpointing: str = ""
    # it draws random numbers that cannot be keyed, so a step that is done again may differ
    draws: bool = False
    computes_in: str = ""
    notes: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()
    together: int = 1
    flow: tuple[UnitFlow, ...] = ()

    @property
    def by_owners(self) -> bool:
        """Does an optimizer step whole tensors at their owners, whose state nobody else holds?"""
        return any(kept.form for kept in self.optimizers)

    def carried(self, block: int) -> tuple[str, ...]:
        """Units before this block whose outputs are needed from it on: what a stage that begins
        with it is called with."""
        before = [unit.name for unit in self.flow if unit.place < block and unit.name]
        later = {name for unit in self.flow if unit.place >= block for name in unit.needs}
        return tuple(name for name in before if name in later)

    @cached_property
    def closed(self) -> dict[str, str]:
        """Axes that may not have more than one rank, and why."""
        axes = {
            "dp": self.no_dp, "tp": self.no_tp, "cp": self.no_cp, "pp": self.no_pp,
            "ep": self.no_ep,
        }  # fmt: skip
        return {axis: why for axis, why in axes.items() if why}

    def refusal(self, layout: Layout) -> str:
        """Why the layout does not compute what the whole model does: `no pp: ...`, or why its ranks
        cannot have equal shares of the experts; '' = nothing is known against it."""
        for axis, why in self.closed.items():
            if getattr(layout, axis) > 1:
                return f"no {axis}: {why}"
        if layout.activation_checkpointing != "none" and not self.recomputes(layout.pp):
            return f"no activation_checkpointing with pp: {self.no_pp_checkpointing}"
        return self._uneven_experts(layout)

    def recomputes(self, pp: int) -> bool:
        """May blocks be computed again on so many stages?"""
        return pp == 1 or not self.no_pp_checkpointing

    def _uneven_experts(self, layout: Layout) -> str:
        ep, ranks = layout.ep, layout.dp_shard * layout.cp
        if ep == 1:
            return ""
        if not self.n_experts:
            return (
                f"ep={ep}, but the model has no experts that ranks can have a share of (modules "
                "whose weights have the expert as their dimension 0); take ep=1"
            )
        if self.n_experts % ep:
            return f"ep={ep}, but ep must divide the {self.n_experts} experts of the model"
        if ranks % ep:
            return f"ep={ep}, but ep must divide dp_shard x cp, which is {ranks}"
        if layout.activation_checkpointing == "selective":
            return f"ep={ep} goes with activation_checkpointing none or full, not with selective"
        return ""

    def kept_of(self, spec: TensorSpec) -> OptimizerSpec:
        """What is kept for a tensor of the model besides itself."""
        if not self.optimizers or spec.buffer or not spec.trainable:
            return OptimizerSpec()
        return self.optimizers[spec.optimizer]


@dataclass(frozen=True)
class HardwareProfile:
    """A GPU kind in its nodes. Rates are peaks as the maker prints them, until `elastic profile`
    has measured; those of links are one direction of one GPU. 0 = not known.

    `flop_per_s`: dense peak by dtype. `reached`: the share of it that a large product reaches.
    `units`: streaming multiprocessors, over which the tiles of a product are spread. `link_*`:
    between nodes; `node_*`: inside one; `*_hop_s`: what each step of a collective takes beside its
    bytes. `launch_s`: of one operation. `measured`: names of the numbers here that were measured.
    `step_share`: measured step time over the predicted one, 1 = never compared.

    What only `elastic profile` tells, at the sizes of the job that it was given: `products`: (rows,
    k, n, FLOP/s); `crowded`: (processes that compute at once on a node, FLOP/s of each in the job's
    products); `crowded_passes`: the same in whole passes of its model, forward and backward;
    `crowded_bytes`: what each moves in its other operations, `op_bytes_per_s`: what one alone
    moves. `collectives`: (name, ranks, seconds, seconds per byte of the whole tensor) inside a
    node; `send` is from one rank to another. `storage_*`: of the job's storage, one process.
    """

    accelerator_type: str = "CPU"
    peak_flop_per_s: float = 1e10
    memory_bytes: int = 0
    link_bytes_per_s: float = 2.9e9
    flop_per_s: tuple[tuple[str, float], ...] = ()
    reached: float = 0.0
    units: int = 0
    memory_bytes_per_s: float = 0.0
    node_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    link_hop_s: float = 0.0
    node_hop_s: float = 0.0
    launch_s: float = 0.0
    arch: str = ""
    measured: tuple[str, ...] = ()
    step_share: float = 1.0
    attention_flop_per_s: float = 0.0
    op_bytes_per_s: float = 0.0
    storage_write_bytes_per_s: float = 0.0
    storage_read_bytes_per_s: float = 0.0
    products: tuple[tuple[int, int, int, float], ...] = ()
    crowded: tuple[tuple[int, float], ...] = ()
    crowded_passes: tuple[tuple[int, float], ...] = ()
    crowded_bytes: tuple[tuple[int, float], ...] = ()
    collectives: tuple[tuple[str, int, float, float], ...] = ()

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`."""
        return dict(self.flop_per_s).get(dtype, 0.0) or self.peak_flop_per_s
