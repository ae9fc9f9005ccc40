"""A hundred mistakes of newcomers: each is answered with a remedy, and with that remedy the line runs.

A row is the line as a newcomer writes it, a part of the answer that says what to do, and the line as it ought to be.
"""

import re

import numpy as np
import pytest
import torch

import distman
from distman import DistmanError, DistributedManager, checkpoint, collectives, fft, mappings, metrics
from distman._cli.parser import make_parser
from distman.data import distributed_loader
from distman.executor import ParallelExecutor
from distman.handler import EarlyStopping, NNHandler
from distman.testing import ranks

MODULES = (distman, torch, checkpoint, collectives, fft, mappings, metrics)
NAMES = {
    **{module.__name__.rpartition(".")[2]: module for module in MODULES},
    **{name: getattr(module, name) for module in (checkpoint, collectives) for name in module.__all__},
    **{one.__name__: one for one in (DistributedManager, NNHandler, EarlyStopping, distributed_loader)},
    "ParallelExecutor": ParallelExecutor,
}
DATA = torch.utils.data.TensorDataset(torch.ones(10, 2), torch.ones(10, 1))


def handler(**options):
    return NNHandler(torch.nn.Linear, in_features=2, out_features=1, **options)


def ready():
    made = handler()
    made.set_optimizer(torch.optim.SGD, lr=0.1)
    made.set_loss_fn(torch.nn.MSELoss())
    made.set_train_loader(DATA, batch_size=2)
    return made


def cli(line):
    return make_parser().parse_args(line.split())


START = [
    ("explain(method=3)", "Pass 'slurm'", "explain()"),
    ("explain(method='slrum')", "must be one of .*slurm", "explain()"),
    ("initialize(method=3)", "Pass 'slurm'", "initialize(method='single')"),
    ("initialize(backend='mpi')", "Leave it out: the device decides", "initialize()"),
    ("initialize(device=0)", "Pass 'cuda' or 'cpu'", "initialize(device='cpu')"),
    ("initialize(device='cuda:0')", "or leave it out to compute on what is there", "initialize()"),
    ("initialize(timeout='5m')", "Pass 300 for five minutes", "initialize(timeout=300)"),
    ("initialize(timeout=-1)", "Leave it out for the default", "initialize()"),
    ("initialize(seed='a')", "Pass one, the same on all ranks, or None", "initialize(seed=1)"),
    ("initialize(use_distributed=True)", "Start the script with torchrun, mpirun or srun", "initialize()"),
    ("DistributedManager()", r"Call DistributedManager\.initialize\(\) once", "initialize(); DistributedManager()"),
]

CALLS = [
    # names that other libraries have
    ("manager.get_rank()", r"Here it is manager\.rank\.", "manager.rank"),
    ("manager.process_index", r"Here it is manager\.rank\.", "manager.rank"),
    ("manager.global_rank", r"Here it is manager\.rank\.", "manager.rank"),
    ("manager.local_process_index", r"manager\.local_rank\.", "manager.local_rank"),
    ("manager.num_processes", r"manager\.world_size\.", "manager.world_size"),
    ("manager.Get_size()", r"manager\.world_size\.", "manager.world_size"),
    ("manager.local_size()", r"manager\.local_world_size\.", "manager.local_world_size"),
    ("manager.is_main_process", r"manager\.is_main\.", "manager.is_main"),
    ("manager.is_global_zero", r"manager\.is_main\.", "manager.is_main"),
    ("manager.wait_for_everyone()", r"manager\.barrier\.", "manager.barrier()"),
    ("manager.prepare(model)", r"manager\.wrap_ddp", "manager.wrap_ddp(model)"),
    ("manager.backward(ones.sum())", r"distman\.Stepper", "distman.Stepper(model, sgd)"),
    ("manager.isend(ones, 0)", r"over the groups of manager\.group\(\)", "manager.group()"),
    ("manager.deepspeed_plugin", "There is no DeepSpeed here", "manager.wrap_fsdp(model)"),
    ("distman.init()", r"DistributedManager\.initialize\.", "DistributedManager.initialize()"),
    ("distman.get_world_size()", r"manager\.world_size, of manager = Dis", "DistributedManager().world_size"),
    ("distman.all_reduce(ones)", r"distman\.collectives\.fused_all_reduce", "fused_all_reduce(ones)"),
    ("distman.all_gather(ones)", r"distman\.collectives\.all_gather_v", "all_gather_v(ones)"),
    ("distman.all_gather_v(ones)", "from distman.collectives import all_gather_v", "all_gather_v(ones)"),
    ("from distman import NNHandler", "from distman.handler import NNHandler", "from distman.handler import NNHandler"),
    ("from distman import init_process_group", "DistributedManager.initialize", "DistributedManager.initialize()"),
    ("from distman.collectives import all_reduce", "fused_all_reduce", "fused_all_reduce(ones)"),
    ("collectives.broadcast(ones)", r"broadcast_data\.", "broadcast_data(ones)"),
    ("handler().fit(1)", r"handler\.train\.", "ready().train(1)"),
    # the command line
    ("cli('run --num_processes 2 x.py')", "here it is -n", "cli('run -n 2 x.py')"),
    ("cli('run --nodes 2 x.py')", "for several, distman launch writes", "cli('launch --backend slurm --nodes 2 x.py')"),
    ("cli('run --rdzv_backend c10d x.py')", "leave it out", "cli('run x.py')"),
    ("cli('run --max_restarts 3 x.py')", "distman keep --restarts N", "cli('keep --restarts 3 -- distman run x.py')"),
    ("cli('chek')", "did you mean check", "cli('check')"),
    ("cli('check --fodler x')", "did you mean --folder", "cli('check --folder x')"),
    ("cli('launch --backend slrum')", "did you mean slurm", "cli('launch --backend slurm')"),
    ("cli('launch --backend slurm --nodes 0')", "at least 1", "cli('launch --backend slurm --nodes 1')"),
    ("cli('plan --mesh a=2')", "required: --world-size", "cli('plan --world-size 2 --mesh a=2')"),
    # the manager
    ("manager.barrier(3)", "as timeout=3", "manager.barrier(timeout=3)"),
    ("manager.barrier(timeout='5m')", "Pass 300", "manager.barrier(timeout=300)"),
    ("manager.barrier(timeout=-1)", "Leave it out", "manager.barrier()"),
    ("manager.group_size(3)", "Pass a string, such as 'world'", "manager.group_size('world')"),
    ("manager.group_size('nodes')", "Did you mean 'node'", "manager.group_size('node')"),
    ("manager.mesh('model')", "Create it first", "manager.initialize_mesh((1,), ('model',)).size(0)"),
    ("manager.initialize_mesh((2, 2), ('a', 'b'))", "Start 4 ranks", "manager.initialize_mesh((1, 1), ('a', 'b'))"),
    ("manager.initialize_mesh(('1',), ('a',))", "Pass the length", "manager.initialize_mesh((1,), ('a',))"),
    ("manager.initialize_mesh((1, 1), ('a',))", "one name per axis", "manager.initialize_mesh((1, 1), ('a', 'b'))"),
    ("manager.initialize_mesh((-1, -1), ('a', 'b'))", "one .* -1", "manager.initialize_mesh((-1, 1), ('a', 'b'))"),
    ("manager.create_process_subgroup('m', 3)", "Choose another size", "manager.create_process_subgroup('m', 1)"),
    ("manager.create_process_subgroup('node', 1)", "another name", "manager.create_process_subgroup('m', 1)"),
    ("manager.create_groups_from_config('w(a=1)')", "initialize_mesh", "manager.initialize_mesh((1,), ('a',))"),
    ("distman.ProcessGroupConfig('w')", r"Write ProcessGroupNode\('world'\)", "distman.ProcessGroupNode('world')"),
    ("manager.wrap_ddp('model')", "Pass the model", "manager.wrap_ddp(model)"),
    ("manager.wrap_ddp(torch.nn.ReLU())(ones)", "Call the module as it is", "torch.nn.ReLU()(ones)"),
    ("manager.wrap_ddp(model, bucket_cap=1)", "Did you mean bucket_cap_mb", "manager.wrap_ddp(model, bucket_cap_mb=1)"),
    ("manager.wrap_fsdp(model, mixed_precision='fp8')", "'bf16'", "manager.wrap_fsdp(model, mixed_precision='bf16')"),
    ("manager.wrap_fsdp(model, shard='layers')", "classes of modules", "manager.wrap_fsdp(model)"),
    ("manager.should_stop('1')", "Pass the number of the step", "manager.should_stop(1)"),
    ("manager.check_replicas(ones)", "Pass the model", "manager.check_replicas(model)"),
    ("distman.split_sizes('10', 2)", "Pass an integer", "distman.split_sizes(10, 2)"),
    ("distman.split_sizes(10.0, 2)", "Pass an integer", "distman.split_sizes(10, 2)"),
    ("distman.split_sizes(10, 0)", "a number of ranks", "distman.split_sizes(10, 2)"),
    ("distman.resolve_device('gpu0')", "'cuda:1' or 'cpu'", "distman.resolve_device('cpu')"),
    ("distman.resolve_device(0)", "Pass 'cuda' or 'cpu'", "distman.resolve_device('cpu')"),
    # collectives, mappings and transforms
    ("all_gather_v([1.0])", "Pass a tensor", "all_gather_v(torch.tensor([1.0]))"),
    ("all_gather_v(numpy)", "Pass a tensor", "all_gather_v(torch.from_numpy(numpy))"),
    (
        "all_gather_v(torch.tensor(1))",
        r"reshape\(1\)",
        "all_gather_v(torch.tensor(1).reshape(1))",
    ),
    ("all_gather_v(ones, sizes=3)", "Pass the same list", "all_gather_v(ones, sizes=[3])"),
    ("all_gather_v(ones, sizes=[2])", "that the shards have", "all_gather_v(ones, sizes=[3])"),
    ("all_gather_v(ones, sizes=[3, 3])", "each of the 1", "all_gather_v(ones, sizes=[3])"),
    ("all_gather_v(ones, dim=2)", "one of these dims", "all_gather_v(ones, dim=-1)"),
    (
        "all_gather_v(ones, group='w')",
        "known are .*'world'",
        "all_gather_v(ones, group='world')",
    ),
    ("all_gather_v(ones.to_sparse())", "to_dense", "all_gather_v(ones.to_sparse().to_dense())"),
    ("all_gather_v(ones.to('meta'))", "empty_like", "all_gather_v(torch.empty_like(ones))"),
    ("scatter_v(None, [3])", "Pass the full tensor", "scatter_v(ones, [3])"),
    ("scatter_v(ones, [3], src=1)", "within the group", "scatter_v(ones, [3], src=0)"),
    ("gather_v(ones, dst='0')", "within the group", "gather_v(ones, dst=0)"),
    ("fused_all_reduce([ones], op='mean')", "avg", "fused_all_reduce([ones], op='avg')"),
    (
        "fused_all_reduce({'a': 1.0})",
        "as_tensor",
        "fused_all_reduce({'a': torch.as_tensor(1.0)})",
    ),
    (
        "fused_all_reduce([ones, ones.int()])",
        "set buffer_dtype",
        "fused_all_reduce([ones, ones.int()], buffer_dtype=torch.float64)",
    ),
    ("broadcast_data([1], src=5)", "within the group", "broadcast_data([1], src=0)"),
    ("mappings.mark_module_as_shared('m')", "Pass the model", "mappings.mark_module_as_shared(model)"),
    ("mappings.copy_to_parallel_region([1], None)", "Pass a tensor", "mappings.copy_to_parallel_region(ones, None)"),
    ("fft.rfft2(ones)", "one of these dims", "fft.rfft2(ones[None])"),
    ("fft.rfft2(ones[None], norm='orth')", "ortho", "fft.rfft2(ones[None], norm='ortho')"),
    ("fft.rfft2(ones[None] * 1j)", "Use fft2", "fft.fft2(ones[None] * 1j)"),
    # work for some ranks
    ("distman.on_rank(print)", r"Write @on_rank\(0\)", "distman.on_rank(0)(print)"),
    ("distman.on_local_rank(print)", r"Write @on_local_rank\(0\)", "distman.on_local_rank(0)(print)"),
    ("distman.on_rank('0')", "Pass ranks", "distman.on_rank(0)"),
    ("distman.on_rank(0)('hello')", "Decorate a function", "distman.on_rank(0)(print)"),
    # metrics
    ("metrics.reduce_loss('x')", "Convert it", "metrics.reduce_loss(float('1'))"),
    ("metrics.reduce_loss(ones)", "Take its mean", "metrics.reduce_loss(ones.mean())"),
    ("metrics.aggregate_metrics([1.0])", "Pass a dict", "metrics.aggregate_metrics({'loss': 1.0})"),
    ("metrics.aggregate_metrics({'a': 'x'})", "Convert it", "metrics.aggregate_metrics({'a': float('1')})"),
    ("metrics.aggregate_loss(1.0, weight=-1)", "number of samples", "metrics.aggregate_loss(1.0, weight=1)"),
    # checkpoints
    ("checkpoint.load(3)", "Pass where the file", "checkpoint.load(file)"),
    ("checkpoint.load(folder / 'missing.pt')", "Correct the path", "checkpoint.load(file)"),
    ("checkpoint.load(folder)", "Name a file in it", "checkpoint.load(folder / 'a.pt')"),
    ("checkpoint.save(file, {'a': 1})", "Pass where the file", "checkpoint.save({'a': 1}, file)"),
    ("checkpoint.save({'a': 1}, folder)", "Name a file in it", "checkpoint.save({'a': 1}, folder / 'b.pt')"),
    ("checkpoint.save({'m': model}, file)", "Convert it", "checkpoint.save({'m': model.state_dict()}, file)"),
    (
        "load_model_state(model, file)",
        r"Pass load\(path\)",
        "load_model_state(model, checkpoint.load(file))",
    ),
    (
        "CheckpointFolder(folder, keep=0)",
        "Pass None to keep all",
        "CheckpointFolder(folder, keep=None)",
    ),
    # data
    ("distributed_loader('train/')", "Make one of your files", "distributed_loader(DATA)"),
    ("distributed_loader(DATA, batch_size='2')", "Pass an integer", "distributed_loader(DATA, batch_size=2)"),
    ("distributed_loader(DATA, batch_size=0)", "positive", "distributed_loader(DATA, batch_size=2)"),
    ("distributed_loader(DATA, batchsize=2)", "Did you mean batch_size", "distributed_loader(DATA, batch_size=2)"),
    ("distributed_loader(torch.utils.data.DataLoader(DATA))", r"Pass loader\.dataset", "distributed_loader(DATA)"),
    # processes
    ("ParallelExecutor(devices=2)", r"Pass \['cpu', 'cpu'\]", "ParallelExecutor(devices=['cpu', 'cpu']).shutdown()"),
    ("ParallelExecutor(num_gpus=2)", "on the CPU", "ParallelExecutor(devices=['cpu', 'cpu']).shutdown()"),
    ("distman.run('train.py', n=2)", "type `distman run` in a shell", "cli('run -n 2 train.py')"),
    ("distman.run(print, n='two')", "gpu, cpu or auto", "cli('run -n auto train.py')"),
    # training
    ("distman.Stepper(sgd, model)", "Pass it before it is wrapped", "distman.Stepper(model, sgd)"),
    ("NNHandler(model)", "or lambda: model", "NNHandler(lambda: model)"),
    ("handler(logger_mode='wandb')", "console, file, both", "handler(logger_mode='console')"),
    ("handler(device='gpu9')", "'cpu'", "handler(device='cpu')"),
    ("handler().set_loss_fn('mse')", r"Pass torch\.nn\.MSELoss\(\)", "handler().set_loss_fn(torch.nn.MSELoss())"),
    ("handler().set_loss_fn(torch.nn.L1Loss)", r"Pass L1Loss\(\)", "handler().set_loss_fn(torch.nn.L1Loss())"),
    ("handler().set_optimizer('sgd', lr=0.1)", "Pass the class", "handler().set_optimizer(torch.optim.SGD, lr=0.1)"),
    (
        "handler().set_optimizer(torch.optim.SGD, lr='1e-3')",
        r"Pass float\('1e-3'\)",
        "handler().set_optimizer(torch.optim.SGD, lr=float('1e-3'))",
    ),
    (
        "handler().set_scheduler(torch.optim.lr_scheduler.StepLR, step_size=1)",
        r"Call set_optimizer\(\) first",
        "ready().set_scheduler(torch.optim.lr_scheduler.StepLR, step_size=1)",
    ),
    ("handler().add_callback(print)", "of a class derived from it", "handler().add_callback(EarlyStopping('loss'))"),
    ("handler().set_train_loader('data/train')", "Make one of your files", "handler().set_train_loader(DATA)"),
    ("handler().set_val_loader(3)", "Make one of your files", "handler().set_val_loader(DATA)"),
    ("handler().set_sde(3)", "'vp', 've'", "handler().set_sde('vp')"),
    ("handler().train(1)", r"Call set_loss_fn\(\)", "ready().train(1)"),
    ("ready().train('1')", "Pass the total number", "ready().train(1)"),
    ("ready().train(0.5)", "or max_steps", "ready().train(max_steps=1)"),
    ("handler().sample((4,))", r"Call set_sde\(\) first", "handler().set_sde('vp')"),
    ("handler().load('missing.pt')", "Correct the path", "handler().save(file); handler().load(file)"),
]
MISTAKES = (ImportError, AttributeError, OSError, TypeError, ValueError, DistmanError)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a line as a program that has a manager, a model and the like; return what it is told where it is wrong."""
    file = tmp_path / "a.pt"
    torch.save({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, file)
    model = torch.nn.Linear(2, 1)
    names = {
        **NAMES,
        **{one.__name__: one for one in (cli, handler, ready)},
        "DATA": DATA,
        "explain": distman.explain,
        "initialize": DistributedManager.initialize,
        "ones": torch.ones(3),
        "numpy": np.ones(3),
        "model": model,
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1),
        "folder": tmp_path,
        "file": file,
    }

    def run(line):
        names["manager"] = DistributedManager() if DistributedManager.is_initialized() else None
        try:
            exec(line, names)  # noqa: S102 - of the tables above
        except MISTAKES as error:
            return str(error)
        except SystemExit:
            return capsys.readouterr().err
        return None

    yield run
    DistributedManager.cleanup()


def test_there_are_a_hundred():
    assert len({wrong for wrong, _, _ in START + CALLS}) == len(START + CALLS) >= 100


@pytest.mark.parametrize(("wrong", "remedy", "right"), START, ids=[row[0] for row in START])
def test_a_start_is_answered_with_what_to_do(wrong, remedy, right, run):
    assert re.search(remedy, run(wrong))
    assert run(right) is None


@pytest.mark.parametrize(("wrong", "remedy", "right"), CALLS, ids=[row[0] for row in CALLS])
def test_a_line_is_answered_with_what_to_do(wrong, remedy, right, run):
    DistributedManager.initialize()
    assert re.search(remedy, run(wrong))
    assert run(right) is None


@ranks(2)
def test_what_is_wrong_is_told_on_several_ranks_before_anything_is_sent():
    ones = torch.ones(3)
    for call, error in (
        (lambda: collectives.all_gather_v([1, 2]), TypeError),
        (lambda: collectives.scatter_v(ones, [3], src="0"), ValueError),
        (lambda: DistributedManager().group_size(3), TypeError),
        (lambda: collectives.fused_all_reduce([ones], op="mean"), ValueError),
    ):
        with pytest.raises(error, match=r"must .*, got "):
            call()
    assert collectives.all_gather_v(ones).shape == (6,)
