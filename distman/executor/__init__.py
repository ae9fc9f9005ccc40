"""Call a function on every device of this machine at once, in resident processes.

::

    from distman.executor import ParallelExecutor

    with ParallelExecutor() as executor:
        results = executor.run(lambda device, power: torch.eye(3, device=device) ** power, 2)
"""

from distman.executor._decorator import parallelize_on_gpus, run_by as run_by
from distman.executor._moving import as_cpu
from distman.executor._parallel import ParallelExecutor

__all__ = ["ParallelExecutor", "as_cpu", "parallelize_on_gpus"]
