"""What a checkpoint may hold: checked, copied, written and read; and weights alone, as other programs read them."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import io
import json
import operator
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

import torch

from distman._base.text import printable
from distman._torch_internals import is_distributed_tensor, is_plain, pickle_in
from distman.checkpoint._location import Location
from distman.errors import CheckpointError

_MAX_BITS = 2_000  # of an integer: torch's safe reader takes no pickled integer of more than 256 bytes
_CHUNK_BYTES = 1 << 20  # read at once for a checksum: enough to hide the cost of a call, little beside any tensor
_ARCHIVE = b"PK\x03\x04"  # by which torch tells its archives from what it wrote before version 1.6
_FOLDER = 0x10  # attribute of an archive's entry, of which torch reads nothing then: the tensor is what memory held
_NUM_OLD_PICKLES = 5  # at the beginning of the latter
_ACTING = "torch.distributed."
"""Where the classes are that torch lets files make once it has sharded tensors, a mesh of new process groups too."""
_NAME = re.compile(r"GLOBAL (\S+)")  # that torch refused, in its message
_LINE_END = "\n"
_LEAVES = (str, float, bool, type(None))
_TYPES_OF_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # bytes, to which the table of contents of safetensors is filled up by spaces


def check_state(
    value: Any, where: str = "state", *, is_sharded: bool = False, outer: frozenset[int] = frozenset()
) -> None:
    """Check that a state can be loaded again by a reader that runs no code; an error says where it cannot.

    If it ``is_sharded``, tensors of which each rank has a part are let through. ``outer`` are the containers around it.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        _check_memory(value, where)
    if kind in _LEAVES or (kind is int and value.bit_length() <= _MAX_BITS) or _is_plain_tensor(value):
        return
    if is_distributed_tensor(value):
        if not is_sharded:
            raise ValueError(
                f"{where} must be a full tensor on rank 0, got a {kind.__name__} of which each rank has a shard. Save "
                "it with save_sharded()."
            )
        return
    if id(value) in outer:
        raise ValueError(f"{where} must not be a part of itself, got the {kind.__name__} around it. Leave it out.")
    check = functools.partial(check_state, is_sharded=is_sharded, outer=outer | {id(value)})
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            check(key, f"the key {key!r} of {where}")
            check(item, f"{where}[{key!r}]")
        for attribute, item in getattr(value, "__dict__", {}).items():
            check(item, f"{where}.{attribute}")
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            check(item, f"{where}[{index}]")
    else:
        _try(value, where)


def _try(value: object, where: str) -> None:
    """Write and read something unusual, as it would be."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        kind = type(value)
        raise ValueError(
            f"{where} must be a tensor, number, string, bool, None, or a dict, list or tuple of these, got "
            f"{kind.__module__}.{kind.__qualname__}. Convert it, or leave it out."
        ) from error


def _is_plain_tensor(value: object) -> bool:
    """Return whether it is a tensor with nothing attached to it."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not vars(value)


def _check_memory(value: torch.Tensor, where: str) -> None:
    """Refuse a tensor whose memory was freed: it would be written as a file that cannot be read, or end the process."""
    own: Any = value.detach()
    tensor: torch.Tensor = own.to_local() if is_distributed_tensor(value) and hasattr(own, "to_local") else value
    if not is_plain(tensor) or not tensor.numel():
        return
    last = tensor.storage_offset() + sum(map(operator.mul, tensor.stride(), (size - 1 for size in tensor.shape)))
    if tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size():
        raise ValueError(
            f"{where} must have memory, got a tensor of shape {tuple(value.shape)} whose memory was freed. Save before "
            "its storage is resized, or where its module has gathered it."
        )


def map_state(value: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return nested dicts, lists and tuples with what a function makes of everything in them but dicts.

    It is given the name of each value, too. A list or a tuple that it returns as it is, is looked into.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        new = kind((key, map_state(item, change, f"{name}.{key}" if name else str(key))) for key, item in value.items())
        if kind is OrderedDict:
            vars(new).update(map_state(vars(value), change, name))  # the versions of the modules are kept there
        return new
    changed = change(value, name)
    if changed is value and kind in (list, tuple):
        return kind(map_state(item, change, f"{name}.{index}") for index, item in enumerate(value))
    return changed


def copy_to_host(state: Any) -> Any:
    """Return a copy of a checked state on the CPU. Tensors that are one, such as tied weights, stay one."""
    made: dict[tuple[object, ...], torch.Tensor] = {}

    def copied(value: Any, _: str) -> Any:
        if isinstance(value, torch.Tensor):
            return _copy_tensor(value, made)
        return value if type(value) in (*_LEAVES, int, list, tuple) else copy.deepcopy(value)

    return map_state(state, copied)


def without_unused_memory(state: Any) -> Any:
    """Return a checked state with copies of the parts of larger tensors: torch would write the larger ones for them."""
    made: dict[tuple[object, ...], torch.Tensor] = {}
    return map_state(state, lambda value, _: _copy_tensor(value, made) if _is_part(value) else value)


def _is_part(value: Any) -> bool:
    if not _is_plain_tensor(value) or value.layout != torch.strided or value.device.type == "meta":
        return False
    return bool(value.numel() * value.element_size() < value.untyped_storage().nbytes())


def _copy_tensor(tensor: torch.Tensor, made: dict[tuple[object, ...], torch.Tensor]) -> torch.Tensor:
    if not _is_plain_tensor(tensor) or tensor.layout != torch.strided or tensor.device.type == "meta":
        return copy.deepcopy(tensor.detach().cpu())
    memory = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
    lazy = tensor.is_conj(), tensor.is_neg()  # views that differ from their base in nothing else
    identity = (*memory, *lazy, tensor.device, tensor.dtype, type(tensor), tensor.requires_grad)
    if identity not in made:
        new = tensor.detach().to("cpu", copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        made[identity] = (
            torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new.requires_grad_(tensor.requires_grad)
        )
    return made[identity]


class Stream:
    """What torch writes to: takes every byte or raises, and keeps the error, in whose place torch raises another."""

    def __init__(self, file: IO[bytes]) -> None:
        self.error: BaseException | None = None
        self._file = file
        self.tell = file.tell

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write everything, in as many pieces as the file takes, and return the number of bytes."""
        left = memoryview(data)
        num_bytes = len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException as error:  # an interrupt too must not be taken for a damaged file
            self.error = error
            raise
        return num_bytes

    def flush(self) -> None:
        """Leave it to the storage, which flushes and syncs when all is written."""

    close = flush


@contextlib.contextmanager
def writing_to(file: IO[bytes]) -> Iterator[Stream]:
    """Let torch write to a file, and raise what the file raised where torch says that it has an unexpected length."""
    stream = Stream(file)
    try:
        yield stream
    except BaseException:
        if stream.error is not None:
            raise stream.error from None
        raise


def write_state(state: object, location: Location) -> None:
    """Write a state that was checked; where that fails, what was there before is as it was."""
    with location.storage.create(location.place) as file, writing_to(file) as stream:
        torch.save(without_unused_memory(state), cast("IO[bytes]", stream))


def read_state(location: Location, device: torch.device) -> Any:
    try:
        file = location.storage.open(location.place)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"no checkpoint at {location}. Correct the path; on several hosts, save where all of them can read."
        ) from error
    except IsADirectoryError as error:
        raise IsADirectoryError(
            f"{location} is a directory and no checkpoint. Name a file in it, or call load_sharded()."
        ) from error
    with file:
        return read_plain(file, location, device)


def read_plain(file: IO[bytes], location: Location, device: torch.device | str = "cpu") -> Any:
    """Return the state in an open file; nothing in it is run."""
    try:
        check_file(file)
        return torch.load(file, map_location=device, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{location} must hold tensors, numbers and strings, {reason_of(error)}. Nothing in it was run. If that is "
            "a class of your own, save what its state_dict() returns; if not, do not trust this source."
        ) from error
    except Exception as error:  # zipfile and torch raise whatever they stumble over in a damaged file
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the beginning
            raise
        _check_device(device)
        size = file.seek(0, io.SEEK_END)
        raise CheckpointError(
            f"{location} is damaged or not a checkpoint: {size} bytes, {reason_of(error)}. Load another one."
        ) from error


def _check_device(device: torch.device | str) -> None:
    try:
        torch.zeros(1, device=device).add_(1)
    except Exception as error:
        raise ValueError(
            f"device must be one that this process can use, got {device}: {reason_of(error)}. Pass one, such as 'cpu'."
        ) from error


def check_file(file: IO[bytes]) -> None:
    """Check what torch does not look at before it reads a file, and go back to the beginning; nothing in it is run."""
    is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
    file.seek(0)
    if is_archive:
        check_sums(file)
        names = _names_in(io.BytesIO(pickle_in(file)))
    else:  # as torch wrote before version 1.6, without checksums
        names = _names_in(file, _NUM_OLD_PICKLES)
    try:
        acting = next((name for name in names if name.startswith(_ACTING)), None)
    except MemoryError:
        raise ValueError("it says that more follows than could be") from None
    if acting is not None:
        raise pickle.UnpicklingError(f"unsupported GLOBAL {acting}")  # in torch's words
    file.seek(0)


def _names_in(file: IO[bytes], num_pickles: int = 1) -> Iterator[str]:
    """Return the names in pickles that follow each other, whatever else they hold; nothing in them is run.

    They are of protocol 2, which spells out each name. The file is read to their end.
    """
    for _ in range(num_pickles):
        start = file.tell()
        if not file.read(1):
            return
        file.seek(start)
        for opcode, argument, _place in pickletools.genops(file):
            if opcode.code == pickle.GLOBAL.decode():
                yield str(argument).replace(" ", ".")


def check_sums(file: IO[bytes]) -> None:
    """Compare what torch wrote with its checksums, and go back to the beginning.

    Nothing is inflated: torch compresses nothing, and what it reads is no more than there is in the file.
    """
    with zipfile.ZipFile(file) as archive:
        _check_sizes(archive.infolist(), file.seek(0, io.SEEK_END))
        for entry in archive.infolist():
            if entry.CRC:  # 0 where torch was told to leave them out
                with archive.open(entry) as content:
                    while content.read(_CHUNK_BYTES):
                        pass
    file.seek(0)


def _check_sizes(entries: list[zipfile.ZipInfo], num_bytes: int) -> None:
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise zipfile.BadZipFile(f"{printable(entry.filename)} is compressed, which torch never does")
        if entry.external_attr & _FOLDER:
            raise zipfile.BadZipFile(f"{printable(entry.filename)} is marked as a folder")
    if sum(entry.file_size for entry in entries) > num_bytes:
        raise zipfile.BadZipFile(f"its {len(entries)} parts are larger than the file")


def reason_of(error: BaseException) -> str:
    """Return why torch could not read a file, or refused to; of its advice to read it in spite of that, nothing."""
    if isinstance(error, pickle.UnpicklingError):
        name = _NAME.search(str(error))
        return f"got {printable(name[1])}" if name else "got a pickle that torch.save did not write"
    return f"{type(error).__name__}: {str(error).strip().partition(_LINE_END)[0].rstrip('.')}"


def write_safetensors(state: Mapping[str, Any], location: Location) -> None:
    """Write tensors of data types that the format has; where that fails, what was there before is as it was.

    Source:
        https://github.com/huggingface/safetensors, "Format".
    """
    for name, one in state.items():
        if not isinstance(one, torch.Tensor) or one.dtype not in _TYPES_OF_SAFETENSORS:
            got = one.dtype if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            raise ValueError(f"{name} must be a tensor of a type that safetensors has, got {got}. Save a file.pt.")
        _check_memory(one, name)
    ordered = dict(sorted(state.items(), key=lambda one: (-one[1].element_size(), one[0])))  # all of them aligned
    contents, end = {}, 0
    for name, one in ordered.items():
        begin, end = end, end + one.numel() * one.element_size()
        contents[name] = {
            "dtype": _TYPES_OF_SAFETENSORS[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    table = json.dumps({"__metadata__": {"format": "pt"}, **contents}).encode()
    table += b" " * (-len(table) % _ALIGNMENT)
    with location.storage.create(location.place) as file:
        stream = Stream(file)
        stream.write(len(table).to_bytes(8, "little"))
        stream.write(table)
        for one in ordered.values():
            plain = one.detach().cpu().resolve_conj().resolve_neg()
            stream.write(plain.contiguous().view(-1).view(torch.uint8).numpy().data)
