"""Conversion of a training state to tensors plus JSON, and of the tensors to safetensors bytes, without pickle.

holdfast writes the safetensors format itself, because the library's `serialize` first copies the whole state into one
string. A save would then need twice the memory. The format is a length, a JSON header and the raw values.
"""

import base64
import itertools
import json
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Array, State
from holdfast.checkpoint.digest import is_count
from holdfast.errors import BadInput, Corrupt

if TYPE_CHECKING:
    import torch  # elsewhere imported only with a tensor at hand: the import takes seconds, and numpy users need none

HEADER_LIMIT = 100_000_000  # bytes of a header, the limit of safetensors readers
DIMENSIONS = 64  # of a tensor, the limit of numpy
BYTES_LIMIT = 1 << 20  # of a `bytes` object in the JSON
ALIGNMENT = 64  # of the first value in the file; each value is aligned to its item size
CHUNK = 1 << 20  # bytes of a file that have a digest of their own, where the file has digests
DIGEST_BYTES = 16  # of one chunk
DIGESTS = "holdfast.chunk_digests"
"""The name of the last tensor in a file whose chunks are verified one by one: their digests."""
_METADATA = "__metadata__"
_TORCH = {  # torch's names of the dtypes
    **{"BOOL": "bool", "C64": "complex64", "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn"},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
DTYPES = frozenset(_TORCH)
"""The safetensors names of the dtypes that can be stored."""
_NUMPY = {code: np.dtype(name) for code, name in _TORCH.items() if "BF" not in code and "_" not in code}
_OF_TORCH = {f"torch.{dtype}": name for name, dtype in _TORCH.items()}
_OF_NUMPY = {dtype: name for name, dtype in _NUMPY.items()}
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, struct.error, RuntimeError, OverflowError)


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """The layout of a safetensors file: its header, and the start and end offset of each tensor.

    `chunks` is the number of digests that the writer appends (one for each 1 MiB of the file), or 0."""

    header: bytes
    spans: dict[str, tuple[int, int]]
    chunks: int = 0

    @property
    def length(self) -> int:
        """The length of the file in bytes, without the digests of its chunks."""
        return max((end for _, end in self.spans.values()), default=len(self.header))

    @property
    def file_length(self) -> int:
        return self.length + self.chunks * DIGEST_BYTES


def layout(tensors: State, metadata: Mapping[str, str] | None = None, *, digests: bool = False) -> PayloadLayout:
    """Return the layout of a safetensors file of `tensors`; raise BadInput for a value that cannot be stored.

    With `digests`, the header lists one more tensor, which the writer appends: the digests of all earlier 1 MiB
    chunks."""
    # Wide dtypes first, so that every value is aligned to its item size. The values of one device are adjacent, so that
    # the device can send them in one copy.
    for name, value in tensors.items():
        dtype_name(name, value)  # raises BadInput for a value that cannot be stored
    devices = {name: str(value.device) if _is_tensor(value) else "cpu" for name, value in tensors.items()}
    spans, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, devices[name])):
        start, end = end, end + int(tensors[name].nbytes)
        spans[name] = (start, end)
    header, chunks = _header(tensors, spans, metadata or {}, None), 0
    while digests and chunks != (needed := math.ceil((len(header) + end) / CHUNK)):
        chunks = needed
        header = _header(tensors, spans, metadata or {}, (end, chunks))
    first = len(header)
    return PayloadLayout(header, {name: (first + start, first + end) for name, (start, end) in spans.items()}, chunks)


def encode(
    tensors: State, metadata: Mapping[str, str] | None = None, *, digests: bool = False
) -> Iterator[memoryview | bytes]:
    """Yield the bytes of a safetensors file of `tensors`, part by part, without copying contiguous CPU tensors.

    With `digests`, the header lists one more tensor, which the caller appends: the digests of all earlier 1 MiB
    chunks."""
    plan = layout(tensors, metadata, digests=digests)
    yield plan.header
    for name in plan.spans:
        yield raw(tensors[name])


def decode(buffer: npt.NDArray[np.uint8], name: str) -> dict[str, Array]:
    """Return the tensors in a safetensors file as views of `buffer`; raise Corrupt if the file `name` is malformed."""
    try:
        length = _header_length(buffer[:8].tobytes(), len(buffer))
        data = buffer[8 + length :]
        entries = _entries(buffer[8 : 8 + length].tobytes(), len(data))
        return {key: _view(data, entry) for key, entry in entries.items() if key != DIGESTS}
    except _MALFORMED as error:
        raise _not_well_formed(name, error) from error


def read_header(read: Callable[[int, int], npt.NDArray[np.uint8]], length: int, name: str) -> dict[str, "Entry"]:
    """Return the header entries of a safetensors file, by tensor name; raise Corrupt if the header is malformed.

    `read(start, end)` must return these bytes of the file, and `length` is the length of the file. The offsets in the
    entries count from the beginning of the file. Error messages contain `name`."""
    try:
        header = _header_length(read(0, min(8, length)).tobytes(), length)
        entries = _entries(read(8, 8 + header).tobytes(), length - 8 - header)
    except _MALFORMED as error:
        raise _not_well_formed(name, error) from error
    entries.pop(DIGESTS, None)
    start = 8 + header
    return {key: entry._replace(start=entry.start + start, end=entry.end + start) for key, entry in entries.items()}


def empty(dtype: str, shape: Sequence[int]) -> "torch.Tensor":
    """Return a new tensor with undefined values; `dtype` is a name of the safetensors format."""
    import torch

    size = math.prod(shape) * bytes_each(dtype)
    if not size:
        return torch.empty(tuple(shape), dtype=torch_dtype(dtype))
    # numpy's memory, because torch aligns its own, and glibc before 2.38 does not reuse what is freed there.
    return torch.frombuffer(np.empty(size, np.uint8), dtype=torch_dtype(dtype)).view(tuple(shape))


def torch_dtype(name: str) -> "torch.dtype":
    """Return torch's dtype for the name of a dtype in the safetensors format, such as "BF16"."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH[name])
    return dtype


def is_dtype(name: str) -> bool:
    """Return True if `name` is a dtype of the safetensors format that can be read and written."""
    return name in _TORCH


def as_tensor(value: Array) -> "torch.Tensor":
    import torch

    return torch.as_tensor(value)


def as_array(data: npt.NDArray[np.uint8], entry: "Entry", shape: Sequence[int]) -> Array:
    """Return the bytes `data` as a tensor or array of `shape` with the dtype of `entry`. Aligned data is not copied."""
    return _view(data, entry._replace(shape=list(shape), start=0, end=len(data)))


def _not_well_formed(name: str, error: Exception) -> Corrupt:
    # Quoted and cut off, because the error may repeat untrusted text.
    return Corrupt(f"{name} is not a well-formed safetensors file: {str(error)!r:.200}")


def _header(
    tensors: State, spans: dict[str, tuple[int, int]], metadata: Mapping[str, str], digests: tuple[int, int] | None
) -> bytes:
    numpys = [name for name, value in tensors.items() if isinstance(value, np.ndarray)]
    words = {**metadata, **({"numpy": json.dumps(numpys)} if numpys else {})}
    entries: dict[str, Any] = {_METADATA: words} if words else {}
    for name, value in tensors.items():  # the header keeps the caller's order, the data does not
        entries[name] = {"dtype": dtype_name(name, value), "shape": list(value.shape), "data_offsets": spans[name]}
    if digests:
        end, chunks = digests
        span = (end, end + chunks * DIGEST_BYTES)
        entries[DIGESTS] = {"dtype": "U8", "shape": [chunks, DIGEST_BYTES], "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise BadInput(
            f"{len(tensors)} tensors need a header of {len(text)} bytes, more than {HEADER_LIMIT}: concatenate some."
        )
    return struct.pack("<Q", len(text)) + text


class Entry(NamedTuple):
    """A tensor in the header of a safetensors file: its dtype, shape, and the offsets of its values."""

    dtype: str
    as_numpy: bool
    shape: list[int]
    start: int
    end: int


def _header_length(first: bytes, size: int) -> int:
    (length,) = struct.unpack("<Q", first)
    if length > min(size - 8, HEADER_LIMIT):
        raise ValueError(f"a header of {length} bytes does not fit")
    return int(length)


def _entries(header: bytes, room: int) -> dict[str, Entry]:
    entries = json.loads(header)
    numpys = set(json.loads(entries.pop(_METADATA, {}).get("numpy", "[]")))
    spans = [entry["data_offsets"] for entry in entries.values()]
    if not all(is_count(start) and is_count(end) and start <= end for start, end in spans):
        raise ValueError("data_offsets are two counts, in order")
    filled = sorted(span for span in spans if span[0] < span[1])
    for before, after in itertools.pairwise(filled):
        if after[0] < before[1]:  # a small file could otherwise become a huge state
            raise ValueError(f"offsets {before} and {after} overlap")
    return {key: _entry(room, key in numpys, **entry) for key, entry in entries.items()}


def _entry(room: int, as_numpy: bool, dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    start, end = data_offsets
    # A dimension of 0 allows any other dimension, but strides are computed without it.
    if len(shape) > DIMENSIONS or not all(map(is_count, shape)) or not is_count(math.prod(max(1, n) for n in shape)):
        raise ValueError("a shape is made of counts")
    _ = (_NUMPY if as_numpy else _TORCH)[dtype]
    if end > room or math.prod(shape) * bytes_each(dtype) != end - start:
        raise ValueError(f"offsets {start}:{end} do not fit {dtype} of shape {shape}")
    return Entry(dtype, as_numpy, shape, start, end)


def _view(data: npt.NDArray[np.uint8], entry: Entry) -> Array:
    part = data[entry.start : entry.end]
    if part.ctypes.data % bytes_each(entry.dtype):
        part = part.copy()  # other writers do not align their values
    if entry.as_numpy:
        array: Array = part.view(_NUMPY[entry.dtype]).reshape(entry.shape)
        return array
    import torch

    if not len(part):
        return empty(entry.dtype, entry.shape)
    return torch.frombuffer(part.data, dtype=torch_dtype(entry.dtype)).reshape(entry.shape)


def dtype_name(name: str, value: Array) -> str:
    """Return the safetensors name of the dtype of `value`; raise BadInput if it cannot be stored exactly."""
    if name in (_METADATA, DIGESTS):
        raise BadInput(f"{name!r} is reserved by the file format: rename the tensor.")
    if _is_tensor(value):
        if str(value.layout) != "torch.strided" or value.is_quantized or value.is_meta:
            raise BadInput(f"tensor {name!r} is not dense ({value.layout}, {value.device}): make it dense first.")
        code = _OF_TORCH.get(str(value.dtype))
    elif isinstance(value, np.ndarray) and type(value) in (np.ndarray, np.memmap):
        code = _OF_NUMPY.get(value.dtype.newbyteorder("="))
    else:
        raise BadInput(f"{name!r} is a {type(value).__name__}: only numpy arrays and torch tensors can be stored.")
    if code is None:
        raise BadInput(f"tensor {name!r} has dtype {value.dtype}, which cannot be stored: use {', '.join(_TORCH)}.")
    return code


def raw(value: Array) -> memoryview:
    """Return the values of a tensor or array as bytes in row-major order. They are copied only if necessary."""
    if isinstance(value, np.ndarray):
        native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        return native.reshape(-1).view(np.uint8).data
    import torch

    plain = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _is_tensor(value: Array) -> "TypeGuard[torch.Tensor]":
    torch = sys.modules.get("torch")  # a tensor exists only after its import
    return torch is not None and isinstance(value, torch.Tensor)


def bytes_each(dtype: str) -> int:
    """Return the size of one value in bytes; `dtype` is a name of the safetensors format, such as "BF16"."""
    return 1 if dtype == "BOOL" else int(dtype.partition("_")[0].lstrip("BCFIU")) // 8


@dataclass(frozen=True, slots=True, eq=False)
class FlatState:
    """A nested state in two parts: `tensors` by path, and `extra`, JSON with all other values and the structure."""

    tensors: dict[str, Array]
    extra: dict[str, Any]


def flatten(state: Any) -> FlatState:
    """Split a nested state into its tensors, and JSON of all other values.

    The state may contain dicts, lists, tuples, numbers, strings, None, bytes, tensors and arrays. Other types raise
    BadInput."""
    tensors: dict[str, Array] = {}
    try:
        tree = _take_apart(state, "", tensors)
    except RecursionError as error:
        raise BadInput("the state contains itself, or is nested too deeply to be saved.") from error
    return FlatState(tensors, {"state": tree})


def unflatten(tensors: dict[str, Array], extra: dict[str, Any]) -> Any:
    """Rebuild the nested state from the two parts that `flatten` returned; raise Corrupt if they do not match."""
    try:
        # Each tensor is taken once: a small tree that names one tensor a thousand times would otherwise become a huge
        # state as soon as it is copied.
        return _put_together(extra["state"], dict(tensors))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"the extra of this snapshot does not describe a state ({error!r:.200}).") from error


# JSON has null, booleans, integers, finite floats, strings and lists; everything else is an object with one key, its tag.
def _take_apart(value: Any, path: str, tensors: dict[str, Array]) -> Any:
    # Exact types: a subclass, such as a named tuple or numpy's float64, would not be restored as the same type.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        if len(value) > BYTES_LIMIT:
            raise BadInput(f"{path} has {len(value)} bytes, more than {BYTES_LIMIT} for JSON: make it a tensor.")
        return {"bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [_take_apart(item, _join(path, i), tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_take_apart(item, _join(path, i), tensors) for i, item in enumerate(value)]}
    if kind is dict:
        return {"dict": _pairs(value, path, tensors)}
    if kind is Counter:  # for example the milestones of a learning-rate schedule
        return {"counter": _pairs(value, path, tensors)}
    if kind is OrderedDict:
        # A module's state_dict has the versions of its layers in an attribute, which load_state_dict reads.
        attributes = _take_apart(vars(value), _join(path, "(attributes)"), tensors)
        return {"ordered": [_pairs(value, path, tensors), attributes]}
    if isinstance(value, np.generic):
        return {"scalar": _name(np.asarray(value), path, tensors)}
    if _is_tensor(value) or isinstance(value, np.ndarray):
        return {"tensor": _name(value, path, tensors)}
    raise BadInput(
        f"{path or 'the state'} is a {kind.__qualname__}, which cannot be saved: make it a number or a tensor."
    )


def _put_together(tree: Any, tensors: dict[str, Array]) -> Any:
    if isinstance(tree, list):
        return [_put_together(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    return _TAGS[tag](content, tensors)


def _pairs(value: dict[Any, Any], path: str, tensors: dict[str, Array]) -> list[list[Any]]:
    # Pairs instead of a JSON object, because optimizers have integer keys and the order matters.
    pairs = []
    for key, item in value.items():
        if key is not None and type(key) not in (bool, int, str, float):
            raise BadInput(f"{path or 'the state'} has a key of type {type(key).__qualname__}: use strings or numbers.")
        pairs.append([_take_apart(key, path, tensors), _take_apart(item, _join(path, key), tensors)])
    return pairs


def _from_pairs(pairs: list[list[Any]], tensors: dict[str, Array]) -> list[tuple[Any, Any]]:
    return [(_put_together(key, tensors), _put_together(item, tensors)) for key, item in pairs]


def _from_ordered(content: list[Any], tensors: dict[str, Array]) -> "OrderedDict[Any, Any]":
    pairs, attributes = content
    result = OrderedDict(_from_pairs(pairs, tensors))
    given = dict(_put_together(attributes, tensors))
    if any(not isinstance(name, str) or hasattr(OrderedDict, name) for name in given):
        raise ValueError("an attribute replaces one of the dict's own")
    vars(result).update(given)
    return result


_TAGS: dict[str, Callable[[Any, dict[str, Array]], Any]] = {
    "float": lambda text, _: float(text),
    "bytes": lambda text, _: base64.b64decode(text, validate=True),
    "tuple": lambda items, tensors: tuple(_put_together(item, tensors) for item in items),
    "dict": lambda pairs, tensors: dict(_from_pairs(pairs, tensors)),
    "counter": lambda pairs, tensors: Counter(dict(_from_pairs(pairs, tensors))),
    "ordered": _from_ordered,
    "scalar": lambda name, tensors: np.asarray(tensors.pop(name))[()],
    "tensor": lambda name, tensors: tensors.pop(name),
}


def _name(value: Array, path: str, tensors: dict[str, Array]) -> str:
    name = path or "state"
    while name in tensors or name == "__metadata__":
        name += "'"  # distinguishes {"a/b": x, "a": {"b": y}}
    dtype_name(name, value)
    tensors[name] = value.detach() if _is_tensor(value) else value
    return name


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
