"""What the manager answers within a function that torch.compile turns into one graph."""

import torch

from distman import DistributedManager
from distman.testing import ranks

QUERIES = {
    "rank": lambda m: m.rank,
    "world_size": lambda m: m.world_size,
    "local_rank": lambda m: m.local_rank,
    "local_world_size": lambda m: m.local_world_size,
    "node_rank": lambda m: m.node_rank,
    "num_nodes": lambda m: m.num_nodes,
    "device": lambda m: m.device.type,
    "cuda": lambda m: m.cuda,
    "distributed": lambda m: m.distributed,
    "backend": lambda m: m.backend,
    "is_main": lambda m: m.is_main,
    "is_local_main": lambda m: m.is_local_main,
    "initialization_method": lambda m: m.initialization_method,
    "broadcast_buffers": lambda m: m.broadcast_buffers,
    "find_unused_parameters": lambda m: m.find_unused_parameters,
    "is_initialized": lambda m: m.is_initialized(),
    "new instance": lambda _: DistributedManager().rank,
    "size of the world": lambda m: m.group_size(),
    "rank in the world": lambda m: m.group_rank(),
    "size": lambda m: m.group_size("pair"),
    "rank in a group": lambda m: m.group_rank("pair"),
    "ranks": lambda m: m.group_ranks("pair"),
    "size of the node": lambda m: m.group_size("node"),
    "ranks of the node": lambda m: m.group_ranks("node"),
    "leaders": lambda m: m.group_size("leaders"),
    "names": lambda m: m.group_names,
    "group": lambda m: m.group("pair") is None,
    "mesh_dims": lambda m: m.mesh_dims,
    "mesh_names": lambda m: m.mesh_names(),
    "mesh_sizes": lambda m: m.mesh_sizes(),
}


@ranks(1, 2)
def test_simple_queries_are_traced_in_one_graph():
    manager = DistributedManager()
    manager.create_process_subgroup("pair", 2 if manager.world_size % 2 == 0 else 1)
    manager.initialize_mesh((-1, 1), ("row", "column"))

    def ask_all(x, manager):
        return x + 1, {name: query(manager) for name, query in QUERIES.items()}

    traced = torch.compile(ask_all, fullgraph=True, backend="eager")
    assert traced(torch.zeros(1), manager)[1] == ask_all(torch.zeros(1), manager)[1]


@ranks(1, 2)
def test_a_compiled_function_asks_anew_in_the_next_job():
    def query(x, manager):
        return x, manager.group_size(), manager.group_size("node"), len(manager.group_names), manager.distributed

    ask = torch.compile(query, fullgraph=True, backend="eager")
    for use_distributed in (None, False, None):
        DistributedManager.cleanup()
        manager = DistributedManager.initialize(device="cpu", use_distributed=use_distributed)
        for name in ("a", "b"):
            assert ask(torch.zeros(1), manager)[1:] == query(None, manager)[1:]
            manager.create_process_subgroup(name, 1)
