"""Makes the backend known to torch: whoever imports this can name it in ``init_process_group``."""

import importlib.machinery
import importlib.util

import torch.distributed as dist

from tests.nccl_rules.library import NAME, build

BACKEND = "nccl_rules"


def _load():
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build()))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    return module


def _make(options, _):
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return _library.make(gloo, options.group_rank, options.group_size)


_library = _load()
dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
