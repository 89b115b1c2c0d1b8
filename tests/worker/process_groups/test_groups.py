"""The private names of torch that groups.py uses, and what DTensor's cached meshes find through
them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic.reshard.communicators import n_communicators
from elastic.types import Layout
from elastic.worker.process_groups import groups
from elastic.worker.process_groups.groups import Groups, keep_names

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    groups._known_names.clear()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def entered(layout: Layout, generation: int = 1, rank: int = 0) -> Groups:
    out = Groups(generation, layout, CPU)
    out.pretend(rank)
    return out


def axis_group(of: Groups, axis: str) -> dist.ProcessGroup:
    assert of.mesh is not None
    return of.mesh.get_group(axis)


def test_a_cached_mesh_finds_the_group_of_the_generation_that_runs() -> None:
    """tp=2 on ranks 0 and 1 in two layouts: the group has another name in the second, the old mesh
    still finds it."""
    first = entered(Layout(tp=2))
    mesh, old = first.mesh, axis_group(first, "tp")
    assert mesh is not None
    first.close()
    second = entered(Layout(dp_shard=2, tp=2), 2)
    new = axis_group(second, "tp")
    assert new.group_name != old.group_name, "the same name: this test shows nothing"
    assert mesh.get_group("tp") is new
    second.close()


def test_meshes_of_every_generation_find_the_group() -> None:
    """Equal meshes of three generations, each with a name of its own: DTensor may have kept any of
    them."""
    layouts = [
        Layout(tp=2),
        Layout(dp_shard=2, tp=2),
        Layout(dp_replicate=2, tp=2),
        Layout(pp=2, tp=2),
    ]
    meshes, names = [], set()
    for generation, layout in enumerate(layouts, 1):
        made = entered(layout, generation)
        assert made.mesh is not None
        meshes.append(made.mesh["tp"])
        names.add(axis_group(made, "tp").group_name)
        assert all(mesh.get_group("tp") is axis_group(made, "tp") for mesh in meshes)
        made.close()
    assert len(names) > 2


def test_what_dtensor_has_cached_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(groups, "_clear_sharding_prop_cache", lambda: cleared.append(1))
    for generation, layout in enumerate(
        [Layout(tp=2), Layout(dp_shard=2, tp=2), Layout(tp=2), Layout(dp_shard=4)], 1
    ):
        made = entered(layout, generation)
        if layout.tp > 1:
            assert made.mesh is not None
            weight = distribute_tensor(
                torch.ones(4, 4), made.mesh["tp"], [Shard(0)], src_data_rank=None
            )
            out = torch.mm(
                DTensor.from_local(torch.ones(2, 4), made.mesh["tp"], [Replicate()]), weight.t()
            )
            assert out.placements == (Shard(1),)
        made.close()
    assert not cleared


def test_a_name_that_is_another_groups_clears_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(groups, "_clear_sharding_prop_cache", lambda: cleared.append(1))
    made = entered(Layout(dp_shard=2, tp=2))
    assert made.mesh is not None
    tp, fsdp = axis_group(made, "tp"), axis_group(made, "fsdp")
    assert groups._known_names[(0, 1), ("tp",), "tp"] == {tp.group_name}
    groups._known_names[(0, 1), ("tp",), "tp"] = {fsdp.group_name}
    assert not keep_names(made.mesh)
    assert cleared == [1]
    every, both = (0, 1, 2, 3), ("fsdp", "tp")
    names = {
        ((0, 1), ("tp",), "tp"): tp,
        ((0, 2), ("fsdp",), "fsdp"): fsdp,
        (every, both, "fsdp"): fsdp,
        (every, both, "tp"): tp,
    }
    assert groups._known_names == {key: {group.group_name} for key, group in names.items()}
    made.close()


def test_a_worker_that_has_become_another_rank_finds_its_own_groups() -> None:
    """Rank 0, then rank 3 of the same mesh: meshes that compare equal, groups of other ranks."""
    first = entered(Layout(dp_shard=2, tp=2))
    mesh = first.mesh
    assert mesh is not None
    first.close()
    second = entered(Layout(dp_shard=2, tp=2), 2, rank=3)
    assert second.mesh == mesh
    assert dist.get_process_group_ranks(mesh.get_group("tp")) == [2, 3]
    second.close()


def test_closed_groups_are_kept_by_no_mesh() -> None:
    made = entered(Layout(dp_shard=2, tp=2))
    mesh = made.mesh
    assert mesh is not None
    sub = mesh["tp"]
    made.close()
    assert not mesh._pg_registry
    assert not getattr(sub, "_pg_registry", None) or sub is mesh


def test_the_default_group_lends_its_name_to_no_axis() -> None:
    made = entered(Layout(dp_shard=2))
    assert axis_group(made, "fsdp") is not made.world
    assert (axis_group(made, "fsdp"),) == made.commit.rows
    made.close()


def test_collectives_are_counted_when_they_begin() -> None:
    """Those that the whole group takes part in; what backends cannot count is left out."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    backend = dist.group.WORLD._get_backend(CPU)
    before = backend._get_sequence_number_for_group()
    for call in (
        dist.all_reduce,
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.all_gather([x.clone()], x),
    ):
        call(torch.ones(4))
        assert backend._get_sequence_number_for_group() == before + 1
        before += 1
    dist.destroy_process_group()
    made = entered(Layout(dp_shard=2, tp=2))
    assert {counted[:2] for counted in made._counted} == {("dp_shard", 0), ("tp", 0)}
    assert isinstance(made.arrived(), tuple)
    made.close()
    assert made.arrived() == ()


def test_a_rank_has_as_many_communicators_as_forecasts_count() -> None:
    for layout in (
        Layout(dp_shard=4), Layout(cp=4), Layout(dp_shard=2, cp=2), Layout(dp_replicate=2,
        dp_shard=2, tp=2), Layout(pp=2, tp=2), Layout(pp=4, dp_replicate=2, dp_shard=2, cp=2, tp=2),
    ):  # fmt: skip
        made = entered(layout)
        used = [group for group in made._device_groups if group.size() > 1]
        assert len(used) == n_communicators(layout) + 1, layout
        made.close()
