"""Every name of physicsnemo.distributed, forward and backward, against one process that holds all tensors."""

import importlib
import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import distman
from distman._base.process_state import reset
from distman.compat import physicsnemo
from distman.compat.physicsnemo import (
    DistributedManager,
    ProcessGroupConfig,
    ProcessGroupNode,
    all_gather_v,
    autograd,
    fft,
    fused_all_reduce,
    gather_v,
    indexed_all_to_all_v,
    mappings,
    mark_module_as_shared,
    scatter_v,
    unmark_module_as_shared,
    utils,
)
from distman.testing import ranks
from tests.collectives.reference import check_against_one_process, losses, random_tensor
from tests.launch.preloaded import PYTHON, server_variables

IN_FLOAT32 = True
PUBLIC = {  # of physicsnemo 2.2
    "": """all_gather_v gather_v indexed_all_to_all_v scatter_v ProcessGroupConfig ProcessGroupNode fused_all_reduce
        DistributedManager PhysicsNeMoUndefinedGroupError PhysicsNeMoUninitializedDistributedManagerWarning
        mark_module_as_shared reduce_loss unmark_module_as_shared""",
    ".autograd": """AllGatherVAutograd GatherVAutograd ScatterVAutograd IndexedAllToAllVAutograd all_gather_v gather_v
        scatter_v indexed_all_to_all_v""",
    ".config": "ProcessGroupConfig ProcessGroupNode",
    ".fft": "DistributedRFFT2 DistributedIRFFT2 conj_pad_helper_2d",
    ".fused_all_reduce": "fused_all_reduce",
    ".manager": """DistributedManager PhysicsNeMoUndefinedGroupError
        PhysicsNeMoUninitializedDistributedManagerWarning""",
    ".mappings": """copy_to_parallel_region reduce_from_parallel_region scatter_to_parallel_region
        gather_from_parallel_region""",
    ".utils": """compute_split_shapes get_memory_format pad_helper truncate_helper split_tensor_along_dim reduce_loss
        distributed_transpose _reduce _split all_gather_v_wrapper all_gather_v_bwd_wrapper gather_v_wrapper
        scatter_v_wrapper indexed_all_to_all_v_wrapper indexed_all_to_all_v_wrapper_bwd mark_module_as_shared
        unmark_module_as_shared""",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_all_names_are_there(module):
    home = importlib.import_module(f"distman.compat.physicsnemo{module}")
    assert [name for name in PUBLIC[module].split() if not hasattr(home, name)] == []


def sizes_of(world_size):
    return [3, 1, 4, 2][:world_size]


def shards(world_size):
    return [random_tensor(size, 2, seed=rank) for rank, size in enumerate(sizes_of(world_size))]


@ranks(1, 4)
def test_all_gather(rank, world_size):
    sizes = sizes_of(world_size)
    for gather in (all_gather_v, autograd.AllGatherVAutograd.apply):
        check_against_one_process(
            lambda shard, gather=gather: gather(shard, sizes, 0, IN_FLOAT32, None),
            lambda inputs: [torch.cat(inputs)] * world_size,
            shards(world_size),
            rank,
            losses(world_size)[0],
        )
    full = torch.cat(shards(world_size))
    mine = shards(world_size)[rank].requires_grad_()
    for given_sizes in (sizes, [(size, 2) for size in sizes], None):
        gathered = utils.all_gather_v_wrapper(mine, given_sizes)
        assert torch.equal(gathered, full)
        assert not gathered.requires_grad
    back = utils.all_gather_v_bwd_wrapper(full * (rank + 1), sizes)
    torch.testing.assert_close(back, mine.detach() * world_size * (world_size + 1) / 2)


@ranks(1, 4)
def test_gather_and_scatter(rank, world_size):
    sizes, last = sizes_of(world_size), world_size - 1
    for gather in (gather_v, autograd.GatherVAutograd.apply):
        check_against_one_process(
            lambda shard, gather=gather: gather(shard, sizes, 0, last, None),
            lambda inputs: [
                torch.cat(inputs) * (one == last) for one in range(world_size)
            ],  # the others get zeros, of the same shape
            shards(world_size),
            rank,
            losses(world_size)[0],
        )
    for scatter in (scatter_v, autograd.ScatterVAutograd.apply):
        check_against_one_process(
            lambda full, scatter=scatter: scatter(full, sizes, 0, last, None),
            lambda inputs: inputs[last].split(sizes),
            [random_tensor(sum(sizes), 2, seed=one) for one in range(world_size)],
            rank,
            losses(world_size)[0],
        )
    full = torch.cat(shards(world_size))
    assert torch.equal(utils.gather_v_wrapper(full.split(sizes)[rank], sizes, dst=last), full * (rank == last))
    assert torch.equal(utils.scatter_v_wrapper(full, sizes, src=last), full.split(sizes)[rank])


@ranks(1, 4)
def test_indexed_all_to_all(rank, world_size):
    """Each rank sends each other one as many rows as that one's number, and one more, from the front."""
    numbers = [[other + 1 for other in range(world_size)] for _ in range(world_size)]
    indices = [torch.arange(number) for number in numbers[rank]]

    def reference(inputs):
        return [torch.cat([full[: other + 1] for full in inputs]) for other in range(world_size)]

    inputs = [random_tensor(5, 2, seed=one) for one in range(world_size)]
    for exchange in (indexed_all_to_all_v, autograd.IndexedAllToAllVAutograd.apply):
        check_against_one_process(
            lambda rows, exchange=exchange: exchange(rows, indices, numbers, IN_FLOAT32, 0, None),
            reference,
            inputs,
            rank,
            losses(world_size)[0],
        )
    mine = inputs[rank].clone().requires_grad_()
    result = indexed_all_to_all_v(mine, indices, numbers)
    weights = random_tensor(*result.shape, seed=10 + rank)
    (expected,) = torch.autograd.grad(result, mine, weights)
    assert torch.equal(utils.indexed_all_to_all_v_wrapper(mine, indices, numbers), result)
    torch.testing.assert_close(utils.indexed_all_to_all_v_wrapper_bwd(weights, indices, numbers, 5), expected)


@ranks(1, 4)
def test_regions_split_as_there(rank, world_size):
    """14 rows over 4 ranks are 4, 4, 4 and 2 of them, where distman's own would be 4, 4, 3 and 3."""
    full = random_tensor(14, 3).requires_grad_()
    sizes = utils.compute_split_shapes(14, world_size)
    part = mappings.scatter_to_parallel_region(full, 0, None)
    assert torch.equal(part, full.split(sizes)[rank])
    assert torch.equal(utils._split(full, 0), part)
    again = mappings.gather_from_parallel_region(part, 0, sizes, None)
    weights = random_tensor(14, 3, seed=1)
    (again * weights).sum().backward()
    assert torch.equal(again, full)
    assert torch.equal(full.grad, weights)
    summed = mappings.reduce_from_parallel_region(mappings.copy_to_parallel_region(full, None), None)
    torch.testing.assert_close(summed, full * world_size)
    before = full.detach().clone()
    assert torch.equal(utils._reduce(full.detach()), summed)
    assert torch.equal(full.detach(), before)


@pytest.mark.parametrize("height", [8, 10])
@ranks(1, 4)
def test_transforms(rank, world_size, height):
    DistributedManager.create_process_subgroup("spatial_parallel", world_size)
    field = random_tensor(2, height, 12)
    expected = torch.fft.rfft2(field, norm="ortho")
    rows, columns = distman.split_sizes(height, world_size), distman.split_sizes(12, world_size)
    mine = field.split(columns, -1)[rank].clone().requires_grad_()
    spectrum = fft.DistributedRFFT2.apply(mine, (height, 12), (-2, -1), "ortho")
    torch.testing.assert_close(spectrum, expected.split(rows, -2)[rank])
    again = fft.DistributedIRFFT2.apply(spectrum, (height, 12), (-2, -1), "ortho")
    torch.testing.assert_close(again, mine)
    assert torch.equal(fft.DistributedRFFT2.apply(mine, (None, None), (-2, -1), "ortho"), spectrum)
    if height % world_size == 0:
        whole = fft.conj_pad_helper_2d(spectrum.detach(), -1, -2, 12)
        torch.testing.assert_close(whole, torch.fft.fft2(field, norm="ortho").split(rows, -2)[rank].to(whole.dtype))
        pieces, work = utils.distributed_transpose(mine, -2, -1, async_op=True)
        assert work.wait()
        assert torch.equal(torch.cat(pieces, -1), field.split(rows, -2)[rank])
        assert utils.distributed_transpose(mine, -2, -1)[1] is None


@ranks(1, 4)
def test_fused_all_reduce(rank, world_size):
    total = world_size * (world_size - 1) / 2
    loss, count = torch.tensor(float(rank), requires_grad=True), torch.tensor([rank])
    assert torch.equal(fused_all_reduce(loss), torch.tensor(total))
    assert not fused_all_reduce(loss).requires_grad
    assert fused_all_reduce((count, count)) == [torch.tensor([total]).long()] * 2
    result, work = fused_all_reduce({"b": loss, "a": loss}, async_op=True)
    assert list(result) == ["b", "a"]
    assert float(result["a"]) == rank, "local values until it is waited for"
    assert work.wait()
    assert float(result["a"]) == total
    with pytest.raises(ValueError, match="buffer_dtype"):
        fused_all_reduce([loss, count])
    assert fused_all_reduce([loss, count], buffer_dtype=torch.float64)[1].tolist() == [int(total)]


def test_a_group_of_other_code_is_enough(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch leaves one of its own
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        reduce = torch.compile(lambda x: fused_all_reduce([x, 2 * x]), fullgraph=True, backend="eager")
        first, second = reduce(torch.ones(2, dtype=torch.float16))
        assert (first.tolist(), second.tolist(), first.dtype) == ([1, 1], [2, 2], torch.float16)
    finally:
        torch.compiler.reset()
        dist.destroy_process_group()


@ranks(2, manager=False)
def test_sums_over_a_group_of_other_code(rank):
    values = [torch.tensor(float(rank)), torch.tensor([rank + 1], dtype=torch.bfloat16)]
    assert [value.item() for value in fused_all_reduce(values)] == [1, 3]
    largest, work = fused_all_reduce(values, op=dist.ReduceOp.MAX, async_op=True)
    assert work.wait()
    assert largest[1].item() == 2


@ranks(1, 2)
def test_shared_modules(rank, world_size):
    module = torch.nn.Linear(1, 1, bias=False)
    assert mark_module_as_shared(module, None, use_fp32_reduction=False) is module
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match="already"):
            mark_module_as_shared(module, None)
    module(torch.tensor([rank + 1.0])).backward()
    assert module.weight.grad.item() == world_size * (world_size + 1) / 2
    unmark_module_as_shared(module)
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match="unmarked"):
            unmark_module_as_shared(module)


@ranks(1, 4)
def test_manager(rank, world_size):
    manager = DistributedManager()
    assert manager.rank == distman.DistributedManager().rank == rank
    assert manager.group() is None
    assert manager.group_name() is None
    assert manager.group_names == ()
    world = ProcessGroupConfig(ProcessGroupNode("world"))
    world.add_node(ProcessGroupNode("model_parallel"), parent="world")
    world.add_node(ProcessGroupNode("data_parallel"), parent=ProcessGroupNode("world"))
    world.set_leaf_group_sizes({"model_parallel": 1, "data_parallel": world_size})
    DistributedManager.create_groups_from_config(world)
    assert manager.group_size("data_parallel") == world_size
    assert "data_parallel" in manager.group_names
    if manager.distributed:
        assert manager.group_name(manager.group("data_parallel")) == "data_parallel"
    for query in (manager.group, manager.group_size, manager.group_rank, manager.mesh):
        with pytest.raises(physicsnemo.PhysicsNeMoUndefinedGroupError):
            query("nowhere")
    with pytest.raises(RuntimeError, match="mesh_shape"):
        manager.initialize_mesh((world_size + 1,), ("rows",))
    mesh = manager.global_mesh
    assert mesh is manager.global_mesh
    assert manager.mesh_dims == {"world": world_size}
    assert mesh["world"].mesh.tolist() == list(range(world_size))
    total = torch.ones(1)
    if manager.distributed:
        dist.all_reduce(total, group=manager.get_mesh_group(mesh))
    assert total.item() == world_size
    assert str(manager).startswith(f"Initialized process {rank} of {world_size} using method '")
    if rank == 0:
        assert physicsnemo.reduce_loss is distman.metrics.reduce_loss


@ranks(1, 2, manager=False)
@pytest.mark.parametrize("forgets", [DistributedManager, distman.DistributedManager], ids=["theirs", "ours"])
def test_a_new_state_is_that_of_all_managers(rank, world_size, forgets):
    managers = DistributedManager, distman.DistributedManager
    for first in (*managers, *managers):
        first.initialize()
        assert [manager().rank for manager in managers] == [rank, rank]
        assert physicsnemo.reduce_loss(1.0, mean=False) == (world_size if rank == 0 else None)
        forgets._shared_state = {}
        assert not any(manager.is_initialized() for manager in managers)
        for manager in managers:
            with pytest.raises(distman.NotInitializedError):
                manager()


@given(size=st.integers(0, 100), num_chunks=st.integers(1, 17))
def test_lengths_of_chunks(size, num_chunks):
    lengths = utils.compute_split_shapes(size, num_chunks)
    assert sum(lengths) == size
    assert len(lengths) == num_chunks
    assert len(set(lengths[:-1])) <= 1
    assert min(lengths) > 0 or size < num_chunks
    if size >= num_chunks:
        parts = utils.split_tensor_along_dim(torch.empty(1, size), 1, num_chunks)
        assert [part.shape[1] for part in parts] == lengths


def test_helpers():
    half = torch.fft.rfft(random_tensor(3, 7), dim=1)
    whole = utils.pad_helper(half, -1, 7, mode="conj")
    torch.testing.assert_close(whole, torch.fft.fft(random_tensor(3, 7) + 0j, dim=1))
    assert torch.equal(utils.pad_helper(half, 0, 5), torch.cat([half, torch.zeros_like(half)[:2]]))
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert utils.get_memory_format(images) is torch.channels_last
    shorter = utils.truncate_helper(images, 3, 2)
    assert torch.equal(shorter, images[..., :2])
    assert utils.get_memory_format(shorter) is torch.channels_last
    assert utils.get_memory_format(torch.rand(2, 3)) is torch.contiguous_format
    for dim, num_chunks in ((2, 1), (0, 4)):
        with pytest.raises(ValueError, match="dim"):
            utils.split_tensor_along_dim(torch.empty(3, 3), dim, num_chunks)


ALONE = """
    import warnings, numpy, pytest, torch
    from physicsnemo.distributed import DistributedManager, fused_all_reduce
    from physicsnemo.distributed.manager import PhysicsNeMoUninitializedDistributedManagerWarning as Uninitialized
    import physicsnemo.distributed.utils

    with pytest.raises(Uninitialized) as raised:
        DistributedManager()
    assert isinstance(raised.value, Warning)
    assert not DistributedManager.is_initialized()
    assert fused_all_reduce({"x": torch.tensor(2.0)}) == {"x": torch.tensor(2.0)}
    with pytest.raises(ValueError, match="buffer_dtype"):
        fused_all_reduce([torch.tensor(1), torch.tensor(1.0)])
    with pytest.raises(TypeError):
        fused_all_reduce(3)
    _, work = fused_all_reduce([torch.tensor(1)], async_op=True)
    assert work.wait()
    DistributedManager.initialize()
    manager = DistributedManager()
    drawn = numpy.random.rand()
    numpy.random.seed(manager.rank)
    assert drawn == numpy.random.rand()
    with warnings.catch_warnings(record=True) as warned:
        DistributedManager.initialize()
    assert "already initialized" in str(warned[0].message)
    print(manager._initialization_method, manager.distributed, manager.world_size, manager.device)
"""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "None False 1 cpu"),
        ({"PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": "ENV", "RANK": "0", "WORLD_SIZE": "1"}, "env True 1 cpu"),
        (
            {
                "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD": "SLURM",
                **{"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"},
            },
            "slurm True 1 cpu",
        ),
    ],
    ids=["alone", "env", "slurm"],
)
def test_under_its_old_name(variables, said):
    code = "from distman.compat.physicsnemo import install; install(); install()\n" + textwrap.dedent(ALONE)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DISTMAN"))}
    finished = subprocess.run(
        [PYTHON, "-c", code],
        env={**outer, **server_variables(), **variables},
        text=True,
        capture_output=True,
        check=False,
    )
    assert (finished.stdout.strip(), finished.returncode) == (said, 0), finished.stderr


def test_wrong_method(monkeypatch):
    reset()  # another test of this process may have left a manager
    monkeypatch.setenv("PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD", "MPICH")
    with pytest.raises(RuntimeError, match="ENV, SLURM, OPENMPI, got 'MPICH'"):
        DistributedManager.initialize()


def test_install_where_physicsnemo_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "physicsnemo", itertools)
    with pytest.raises(ImportError, match="got one that is"):
        physicsnemo.install()
