"""A first message that carries a signature: ranks that want different things find out, and none waits for ever."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distman._base.text import printable
from distman._job.groups.registry import Group
from distman._torch_internals import despite_traces
from distman.collectives._border import refusal_text
from distman.collectives._exchange import all_gather_texts, begin_all_reduce, begin_sum, control_device
from distman.errors import PlanMismatchError

MESSAGE_WORDS = 512
"""Words of 8 bytes in the first message. Its length is fixed, so that ranks which disagree still send equal messages;
with 4 KiB it is still bound by latency."""
_SIGNATURE_WORDS = 4  # of 16 bits: 64 bits of a digest, of which even the sum over 65,536 ranks is exact in a float64
_REFUSAL = "refusal"
_MAX_SHOWN = 8  # tensors; more of them would hide the rest of the message
HEADER_WORDS = 1 + 2 * _SIGNATURE_WORDS
"""One word of ones, the words of a signature, their squares; the rest is room for data to be summed."""
Brought = list[Any]
"""What a rank brings, as JSON: operation, dtype, and path, shape and dtype of each tensor."""


@functools.lru_cache(maxsize=64)
def signed_message(text: str, device: torch.device) -> torch.Tensor:
    """Return the message without data, in float64 whatever it is about; clone it before the ranks' are summed.

    Ranks that want different things must all sum numbers of one type: on NCCL nobody knows what else comes of it.
    """
    digest = hashlib.sha256(text.encode()).digest()
    words = [int.from_bytes(digest[2 * word : 2 * word + 2], "big") for word in range(_SIGNATURE_WORDS)]
    message = torch.zeros(MESSAGE_WORDS, dtype=torch.float64, device="cpu")  # whatever the default device is
    message[:HEADER_WORDS] = torch.tensor([1, *words, *(word * word for word in words)], device="cpu")
    return message.to(device)


def check_signed(total: torch.Tensor, text: str, group: Group) -> None:
    """Raise what the ranks bring if their texts differ, or if one has refused the call.

    If their signatures were equal, the square of a sum is that of equal terms.
    """
    ones, *words = total[:HEADER_WORDS].tolist()
    sums, squares = words[:_SIGNATURE_WORDS], words[_SIGNATURE_WORDS:]
    if ones == group.size and all(one * one == ones * square for one, square in zip(sums, squares, strict=True)):
        return
    brought = [json.loads(text) for text in all_gather_texts(text, group)]
    refusals = [printable(why) for operation, why, _ in brought if operation == _REFUSAL]
    if refusals:
        raise PlanMismatchError("\n".join(refusals))
    lines = [f"  rank {rank}: {describe(one, brought)}" for rank, one in zip(group.ranks, brought, strict=True)]
    raise PlanMismatchError(
        "all ranks must bring the same keys, shapes, dtypes and operation to the same call. They bring:\n"
        + "\n".join(lines)
    )


def describe(one: Brought, all_brought: Sequence[Brought]) -> str:
    """Return what one rank brings that not all ranks bring."""
    operation, dtype, rows = one
    own = [row for row in rows if not all(row in others for _, _, others in all_brought)]
    shown = [f"{path or 'the tensor'} {shape} {kind}" for path, shape, kind in own[:_MAX_SHOWN]]
    among = f", among them {', '.join(shown)}" if shown else ""
    return printable(f"{operation} in {dtype} of {len(rows)} tensors{among}")


def refuse_in_sum(error: Exception, operation: str, group: Group) -> None:
    """Take part in the sum with which a call begins, and let the signature say that this rank refuses."""
    if group.size == 1:
        return
    text = json.dumps([_REFUSAL, refusal_text(error, operation, group), []])
    message = signed_message(text, control_device(group)).clone()
    total = begin_sum(message, group)()
    with contextlib.suppress(PlanMismatchError):
        check_signed(total, text, group)


@despite_traces
def sum_numbers(numbers: Sequence[float], call: str, names: Sequence[str], group: Group) -> list[float]:
    """Return the sums of numbers over a group, in double precision; the ranks must agree on call and names."""
    if group.size == 1:
        return list(numbers)
    text = json.dumps([call, str(torch.float64), [[name, [], str(torch.float64)] for name in names]])
    device = control_device(group)
    data = torch.tensor(numbers, dtype=torch.float64, device=device)
    message = signed_message(text, device).clone()
    end = HEADER_WORDS + len(numbers)
    fits = end <= MESSAGE_WORDS
    if fits:
        message[HEADER_WORDS:end] = data
    message = begin_sum(message, group)().cpu()
    check_signed(message, text, group)
    total = message[HEADER_WORDS:end] if fits else begin_all_reduce(data, dist.ReduceOp.SUM, group)()
    sums: list[float] = total.tolist()
    return sums
