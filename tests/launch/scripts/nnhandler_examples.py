"""Run the examples of NNHandler's documents; changed are the imports and, where there is no GPU, what names GPUs."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from distman import DistributedManager
from distman.compat.nnhandler import initialize_ddp

ON_RANK = """
import torch.distributed as dist
from distman.compat.nnhandler import on_rank

@on_rank(0)  # Only execute on rank 0
def save_checkpoint(model, path):
    torch.save(model.state_dict(), path)
    print(f"Checkpoint saved to {path}")

# This will only execute on rank 0, other ranks will wait
save_checkpoint(model, "checkpoint.pth")

@on_rank([0, 1])  # Execute on ranks 0 and 1
def process_data(data):
    # Process data on ranks 0 and 1
    return processed_data

# This will execute on ranks 0 and 1, other ranks will wait
process_data(data)
"""

INITIALIZE = """
import torch.distributed as dist
from distman.compat.nnhandler import initialize_ddp

# Initialize DDP and get distributed information
distributed, rank, local_rank, world_size, device = initialize_ddp()

# Use the returned values to configure your training
if distributed:
    print(f"Running on rank {rank} of {world_size} with device {device}")
else:
    print(f"Running in non-distributed mode on device {device}")
"""

MANUAL = """
import torch
import torch.distributed as dist
from distman.compat.nnhandler import initialize_ddp

# Initialize DDP
distributed, rank, local_rank, world_size, device = initialize_ddp()

# Create a model and move it to the correct device
model = MyModel().to(device)

# If using DDP, wrap the model
if distributed:
    model = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[local_rank] if device.type == 'cuda' else None
    )

# Now you can use the model for training
"""

HELPERS = [
    """
import torch.distributed as dist
from distman.compat.nnhandler import aggregate_metrics

# Calculate metrics on each process
local_metrics = {
    'accuracy': 0.85,
    'f1_score': 0.78
}

# Aggregate metrics across all processes
if dist.is_initialized():
    world_size = dist.get_world_size()
    device = torch.device(f'cuda:{dist.get_rank()}')
    global_metrics = aggregate_metrics(local_metrics, world_size, device)
    # global_metrics now contains the average accuracy and f1_score across all processes
""",
    """
import torch.distributed as dist
from distman.compat.nnhandler import aggregate_loss

# Calculate loss on each process
local_loss = model_loss.item()  # e.g., 0.342

# Aggregate loss across all processes
if dist.is_initialized():
    world_size = dist.get_world_size()
    device = torch.device(f'cuda:{dist.get_rank()}')
    global_loss = aggregate_loss(local_loss, world_size, device)
    # global_loss now contains the average loss across all processes
""",
    """
import torch.distributed as dist
from distman.compat.nnhandler import broadcast_if_ddp

# Only rank 0 loads the configuration
config = None
if dist.get_rank() == 0:
    config = load_config_from_file('config.json')

# Broadcast to all ranks
config = broadcast_if_ddp(config)
# Now all ranks have the same config
""",
]

DEVICES = """
from distman.compat.nnhandler import _resolve_device

# Resolve a device string
device = _resolve_device("cuda")  # Returns torch.device("cuda") if CUDA is available, else CPU

# Resolve a specific GPU
device = _resolve_device("cuda:1")  # Returns torch.device("cuda:1") if available, else CPU

# Resolve a device object
device_obj = torch.device("cuda")
resolved_device = _resolve_device(device_obj)  # Validates and returns the device
"""

ALL_DEVICES = """
import torch
from distman.compat.nnhandler import parallel_on_all_devices

@parallel_on_all_devices
def my_model_forward(data_chunk):
    # data_chunk is a slice of the batch on a specific GPU
    device = data_chunk.device
    # ... perform operations on data_chunk ...
    new_tensor = torch.ones(1, device=device)
    # ... more operations ...
    return new_tensor

# Move your entire input batch to the primary CUDA device
full_batch = torch.randn(128, 10).to('cuda:0')

# Call the function. DataParallel will automatically split the batch,
# move chunks to other GPUs, execute the function, and gather results
results = my_model_forward(full_batch)
"""

EXECUTORS = [
    """
import torch
from distman.compat.nnhandler import ParallelExecutor

def heavy_computation(device, data):
    # Move data to the specified device
    data = data.to(device)
    # Perform computation
    result = data * 2
    return result

# Create some data
data = torch.tensor([1, 2, 3])

# Use ParallelExecutor as a context manager
with ParallelExecutor(num_gpus=2) as executor:
    # Run the function on 2 GPUs
    results = executor.run(heavy_computation, data)
    # results is a list of tensors, one from each GPU
""",
    """
import torch
from distman.compat.nnhandler import parallelize_on_gpus

@parallelize_on_gpus()
def process_on_gpu(device, data):
    # This function will be executed on each GPU
    return data.to(device) * 2

# Create some data
data = torch.tensor([1, 2, 3])

# Run the function on all available GPUs
results = process_on_gpu(data)
# results is a list of tensors, one from each GPU

# You can also specify the number of GPUs to use
@parallelize_on_gpus(num_gpus=2)
def another_gpu_function(device, x, y):
    return (x + y).to(device)

# This will run only on the first 2 GPUs
results = another_gpu_function(torch.tensor([1, 2]), torch.tensor([3, 4]))
""",
]

README = """
import torch
from distman.compat.nnhandler import NNHandler # Assuming src layout

# Dummy components for illustration
class YourModel(torch.nn.Module):
    def __init__(self): super().__init__(); self.linear = torch.nn.Linear(10, 1)
    def forward(self, x): return self.linear(x)
def your_loss_fn(pred, target): return torch.nn.functional.mse_loss(pred, target)
your_train_dataset = torch.utils.data.TensorDataset(torch.randn(100, 10), torch.randn(100, 1))
your_val_dataset = torch.utils.data.TensorDataset(torch.randn(50, 10), torch.randn(50, 1))

# --- Main NNHandler Workflow ---

# 1. Initialize NNHandler (DDP auto-detected if environment is set)
handler = NNHandler(
    model_class=YourModel,
    device="cuda" if torch.cuda.is_available() else "cpu", # DDP will assign specific cuda device
    logger_mode=NNHandler.LoggingMode.CONSOLE, # Log to console (Rank 0 only)
    model_type=NNHandler.ModelType.REGRESSION # Specify model type
    # Add model_kwargs if needed: hidden_units=128
)

# 2. Configure Components
handler.set_optimizer(torch.optim.Adam, lr=1e-3)
handler.set_loss_fn(your_loss_fn)
handler.set_train_loader(your_train_dataset, batch_size=16)
handler.set_val_loader(your_val_dataset, batch_size=16)

# Optional: Add Metrics & Callbacks
def your_metric(pred, target): return torch.abs(pred - target).mean().item()
handler.add_metric("mae", your_metric)
from distman.compat.nnhandler import ModelCheckpoint
handler.add_callback(ModelCheckpoint(filepath="models/best_model.pth", monitor="val_loss"))

# 3. Train
handler.train(
    epochs=10,
    validate_every=1,
    use_amp=True, # Enable AMP if available and on CUDA
    gradient_accumulation_steps=2, # Example: Accumulate gradients
    ema_decay=0.99 # Example: Use EMA
)

# 4. Save Final State (Rank 0 saves)
handler.save("models/final_handler_state.pth")

# 5. Load and Predict
# To run prediction/loading, ensure the environment matches (e.g., DDP or single process)
loaded_handler = NNHandler.load("models/final_handler_state.pth")
predictions = loaded_handler.predict(some_data_loader) # Predict gathers on Rank 0
"""


def run(example: str, **left_open: object) -> dict[str, object]:
    """Run an example with what it leaves open, and return its names."""
    if not torch.cuda.is_available():
        cpus = 'devices=["cpu", "cpu"]'
        example = example.replace("num_gpus=2", cpus).replace("parallelize_on_gpus()", f"parallelize_on_gpus({cpus})")
        example = example.replace(".to('cuda:0')", ".to('cpu')")
    globals().update(left_open)
    # As the program itself, whose classes checkpoints name.
    exec(compile(example, "an example", "exec"), globals())  # noqa: S102 - that is what examples are for
    return dict(globals())


def run_helpers() -> None:
    for example in HELPERS:
        names = run(example, model_loss=torch.tensor(0.5), load_config_from_file=lambda path: {"file": path})
    assert names["config"] == {"file": "config.json"}


def main() -> None:
    num_ranks = int(sys.argv[1])
    model = torch.nn.Linear(1, 1)
    if "RANK" in os.environ:  # torch's own start, which no manager knows of
        dist.init_process_group("gloo")
        run_helpers()
        assert DistributedManager().world_size == num_ranks
        DistributedManager.cleanup(barrier=True)
        dist.destroy_process_group()
    os.chdir(sys.argv[2])
    run(ON_RANK, model=model, processed_data=3, data=None)  # before the program has started a job
    found = run(INITIALIZE)
    assert (found["distributed"], found["world_size"]) == (num_ranks > 1, num_ranks)
    again = (False, 0, -1, 1, torch.device("cpu")) if num_ranks == 1 else None
    assert initialize_ddp() == again
    DistributedManager.cleanup(barrier=True)
    manual = run(MANUAL, MyModel=lambda: torch.nn.Linear(1, 1))
    assert hasattr(manual["model"], "module") == (num_ranks > 1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run_helpers()
    run(DEVICES)
    results = run(ALL_DEVICES)["results"]
    assert isinstance(results, torch.Tensor)
    if found["rank"] == 0:  # whose workers use all devices
        doubled, added = (run(example)["results"] for example in EXECUTORS)
        assert [one.tolist() for one in doubled] == [[2, 4, 6]] * 2
        assert [one.tolist() for one in added] == [[4, 6]] * 2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(20, 10)), batch_size=8)
    handler = run(README, some_data_loader=loader)
    predictions = handler["predictions"]
    assert (predictions is None) == bool(found["rank"])
    assert predictions is None or [len(one) for one in predictions] == [8, 8, 4]
    assert Path("models/best_model.pth").is_file()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
