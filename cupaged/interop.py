"""The one file that knows array libraries: pointers, dtypes, devices, streams, DLPack.

A *vector* is what a backend reads: on the host a contiguous int64 `numpy.ndarray`, on a GPU the tuple
``(address, stride in bytes, 1 if int64 else 0, length, owner)``. A *table* is a two-dimensional int32 array whose
rows are contiguous: a `numpy.ndarray`, or ``(address, elements between rows, rows, columns, owner)``. Libraries are
known by name: ``"numpy"``, ``"torch"``, ``"cupy"``, ``"numba"``. None of them but NumPy is imported before one of its
arrays turns up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "device_table",
    "device_vector",
    "differing",
    "host_array",
    "host_table",
    "host_vector",
    "is_on_gpu",
    "library_of",
    "parse_device",
    "tensor_vector",
    "to_host",
    "to_torch",
]

_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32))
DeviceVector = tuple[int, int, int, int, Any]
DeviceTable = tuple[int, int, int, int, Any]


def parse_device(device: Any) -> tuple[str, int | None]:
    """Split a device into kind and index.

    Parameters
    ----------
    device : str, int, torch.device, cupy.cuda.Device or jax.Device
        ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``, an index of a GPU, or a library's own device object.

    Returns
    -------
    kind : str
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    index : int or None
        None stands for the current GPU.

    Raises
    ------
    ValueError
        If it is none of these.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return _cuda_index(device, device)
    platform = getattr(device, "platform", None)  # of a jax.Device
    if platform in ("cpu", "gpu"):
        return ("cpu", None) if platform == "cpu" else _cuda_index(device.local_hardware_id, device)
    index = getattr(device, "id", None)
    if index is not None and platform is None:
        return _cuda_index(index, device)
    kind, _, number = str(device).partition(":")
    if kind in ("auto", "cpu") and (not number or kind == "cpu"):
        return kind, None
    if kind == "cuda" and (not number or number.isdecimal()):
        return "cuda", int(number) if number else None
    raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {device!r}")


def _cuda_index(index: int, device: Any) -> tuple[str, int]:
    if index < 0:
        raise ValueError(f"device must be the index of a GPU, not {device!r}")
    return "cuda", index


def library_of(x: Any) -> str:
    """Name of the library in which results for `x` leave; ``""`` where the backend's own serves."""
    library = _LIBRARIES.get(type(x))
    if library is None:
        library = _LIBRARIES[type(x)] = _library_of(x)
        if library == "torch" and isinstance(x, sys.modules["torch"].Tensor):
            _TENSORS.add(type(x))
    return library


def _library_of(x: Any) -> str:
    module = type(x).__module__.partition(".")[0]
    if module in ("torch", "cupy"):
        return module
    if module in ("numba", "numba_cuda", "numba_cuda_mlir") and hasattr(x, "__cuda_array_interface__"):
        return "numba"
    if isinstance(x, np.ndarray):
        return "numpy"
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(x, torch.Tensor) else ""


def is_on_gpu(x: Any) -> bool:
    """Whether `x` holds its elements on a GPU."""
    if type(x) in _TENSORS:
        return bool(x.is_cuda)
    library = library_of(x)
    if library == "torch":
        return type(x) in _TENSORS and bool(x.is_cuda)  # dtypes and devices are of torch too
    if library == "numpy" or isinstance(x, Sequence):
        return False
    if hasattr(x, "__cuda_array_interface__"):
        return True
    return hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) in (2, 13)


def host_array(x: Any, name: str) -> np.ndarray:
    """View or convert a host argument as a one-dimensional integer array.

    Raises
    ------
    TypeError
        If the elements are neither int32 nor int64 (lists: not integers), or `x` is no array.
    ValueError
        If it has more than one dimension, or lives on a GPU.
    """
    array = x if type(x) is np.ndarray else _as_numpy(x, name)
    if array.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {tuple(array.shape)}")
    return array


def _as_numpy(x: Any, name: str) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if type(x) not in _TENSORS and isinstance(x, list | tuple | range):
        return _from_list(x, name)
    if is_on_gpu(x):
        raise ValueError(f"{name} is on a GPU, but this allocator is on the CPU")
    if library_of(x) == "torch":
        try:
            return x.numpy()
        except (AttributeError, TypeError, RuntimeError) as error:
            raise TypeError(f"{name} must be a torch tensor with numbers on the CPU: {error}") from None
    if hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError) as error:  # a dtype that NumPy lacks, for one
            raise TypeError(f"{name} cannot be read through DLPack: {error}") from None
    if hasattr(x, "__array_interface__") or hasattr(x, "__array__"):
        return np.asarray(x)
    raise TypeError(f"{name} must be an array or a list of integers, not {type(x).__name__}")


def _from_list(x: Sequence, name: str) -> np.ndarray:
    if not len(x):
        return np.zeros(0, np.int64)
    try:
        array = np.array(x)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a flat list of integers: {error}") from None
    if array.dtype.kind in "Of" and all(isinstance(n, int) for n in x) and not any(isinstance(n, bool) for n in x):
        raise ValueError(f"{name} holds an integer that does not fit int64")
    if array.dtype.kind == "b" or array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > 2**63 - 1:
        raise ValueError(f"{name} holds {array.max()}, which does not fit int64")
    return array if array.dtype == np.int32 else array.astype(np.int64, copy=False)


def host_vector(x: Any, name: str) -> np.ndarray:
    """`host_array`, as the contiguous, writeable int64 array that compiled host kernels take."""
    array = np.ascontiguousarray(host_array(x, name), np.int64)
    return array if array.flags.writeable else array.copy()


def tensor_vector(x: Any, name: str, device: int) -> DeviceVector | None:
    """`device_vector` of a torch tensor on a GPU; None for whatever else: the common case, in few steps."""
    return _read_torch(x, name, device) if type(x) in _TENSORS and x.is_cuda else None


def device_vector(x: Any, name: str, device: int) -> DeviceVector:
    """Address of a GPU argument, without a copy.

    Parameters
    ----------
    x : torch.Tensor, cupy.ndarray, or anything with ``__cuda_array_interface__`` or ``__dlpack__``
        One-dimensional int32 or int64 with any stride.
    name : str
        The argument's name, for messages.
    device : int
        Index of the GPU that it must be on.

    Returns
    -------
    tuple
        ``(address, stride in bytes, 1 if int64 else 0, length, owner)``.

    Raises
    ------
    TypeError
        If the elements are neither int32 nor int64.
    ValueError
        If it has more than one dimension, or is on another device.
    """
    kind = type(x)
    reader = _READERS.get(kind)
    if reader is None:
        reader = _READERS[kind] = _reader(x)
    return reader(x, name, device)


def _reader(x: Any):
    library = library_of(x)
    if library == "torch":
        return _read_torch
    if library == "cupy" and hasattr(x, "data"):
        return _read_cupy
    return _read_interface


def _read_torch(x: Any, name: str, device: int) -> DeviceVector:
    torch = sys.modules["torch"]
    dtype = x.dtype
    if dtype is torch.int64:
        wide = 1
    elif dtype is torch.int32:
        wide = 0
    else:
        raise TypeError(f"{name} must be int32 or int64, not {dtype}")
    strides = x.stride()
    if len(strides) != 1:
        raise ValueError(f"{name} must have one dimension, not shape {tuple(x.shape)}")
    if x.get_device() != device:
        raise ValueError(f"{name} is on {x.device}, but this allocator is on cuda:{device}")
    return x.data_ptr(), strides[0] << (2 + wide), wide, x.numel(), x


def _read_cupy(x: Any, name: str, device: int) -> DeviceVector:
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, not {x.dtype}")
    if x.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {x.shape}")
    if x.data.device_id != device:
        raise ValueError(f"{name} is on cuda:{x.data.device_id}, but this allocator is on cuda:{device}")
    return x.data.ptr, x.strides[0], int(x.dtype.itemsize == 8), x.size, x


def _read_interface(x: Any, name: str, device: int) -> DeviceVector:
    if not hasattr(x, "__cuda_array_interface__"):
        return device_vector(_from_dlpack(x, name), name, device)
    found = _device_of(x)
    if found is not None and found != device:
        raise ValueError(f"{name} is on cuda:{found}, but this allocator is on cuda:{device}")
    if hasattr(x, "block_until_ready"):
        x.block_until_ready()  # JAX computes on streams of its own, which its interface does not name
    interface = x.__cuda_array_interface__
    dtype, shape = np.dtype(interface["typestr"]), interface["shape"]
    if dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, not {dtype}")
    if len(shape) != 1:
        raise ValueError(f"{name} must have one dimension, not shape {shape}")
    strides = interface.get("strides")
    stride = strides[0] if strides else dtype.itemsize
    return interface["data"][0], stride, int(dtype.itemsize == 8), shape[0], x


def host_table(x: Any, name: str) -> np.ndarray:
    """View a request table on the host; it is written in place, so nothing is converted.

    Raises
    ------
    TypeError
        If it is not int32, or no array.
    ValueError
        If it has not two dimensions, its rows are not contiguous, it is read-only, or on a GPU.
    """
    if is_on_gpu(x):
        raise ValueError(f"{name} is on a GPU, but this allocator is on the CPU")
    if library_of(x) == "torch":
        array = x.detach().numpy()
    elif isinstance(x, np.ndarray):
        array = x
    else:
        raise TypeError(f"{name} must be a NumPy array or a torch tensor, not {type(x).__name__}")
    if array.dtype != np.int32:
        raise TypeError(f"{name} must be int32, not {array.dtype}")
    _check_table(name, array.shape, array.strides)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but it is written in place")
    return array


def device_table(x: Any, name: str, device: int) -> DeviceTable:
    """Address of a request table on a GPU.

    Parameters
    ----------
    x : torch.Tensor, cupy.ndarray, or anything with ``__cuda_array_interface__``
        int32, shape ``(rows, columns)``, rows contiguous.
    name : str
        The argument's name, for messages.
    device : int
        Index of the GPU that it must be on.

    Returns
    -------
    tuple
        ``(address, elements between rows, rows, columns, owner)``.

    Raises
    ------
    TypeError
        If it is not int32.
    ValueError
        If it has not two dimensions, its rows are not contiguous, it is read-only, or on another device.
    """
    plain = _plain_table(x, device) if type(x) in _TENSORS else None
    if plain is not None:
        return plain
    if not is_on_gpu(x):
        raise ValueError(f"{name} is on the host, but this allocator is on cuda:{device}")
    address, shape, strides, is_int32, dtype, found = _describe(x)
    if not is_int32:
        raise TypeError(f"{name} must be int32, not {dtype}")
    if found is not None and found != device:
        raise ValueError(f"{name} is on cuda:{found}, but this allocator is on cuda:{device}")
    _check_table(name, shape, strides)
    if library_of(x) not in ("torch", "cupy") and x.__cuda_array_interface__["data"][1]:
        raise ValueError(f"{name} is read-only, but it is written in place")
    return address, strides[0] // 4, shape[0], shape[1], x


def _plain_table(x: Any, device: int) -> DeviceTable | None:
    """A tensor that has nothing to complain of, as every step's should be."""
    if x.dtype is not sys.modules["torch"].int32 or x.get_device() != device:
        return None
    shape, strides = x.shape, x.stride()
    if len(shape) != 2 or strides[1] != 1 or not 0 < shape[1] <= strides[0]:
        return None
    return x.data_ptr(), strides[0], shape[0], shape[1], x


def _describe(x: Any) -> tuple[int, tuple, tuple, bool, Any, int | None]:
    """Address, shape, strides in bytes, whether int32, dtype, device."""
    library = library_of(x)
    if library == "torch":
        torch = sys.modules["torch"]
        strides = tuple(4 * s for s in x.stride())
        return x.data_ptr(), tuple(x.shape), strides, x.dtype is torch.int32, x.dtype, x.get_device()
    interface = x.__cuda_array_interface__
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    contiguous = tuple(dtype.itemsize * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    strides = interface.get("strides") or contiguous
    found = x.data.device_id if library == "cupy" else _device_of(x)
    return interface["data"][0], shape, tuple(strides), dtype == np.int32, dtype, found


def _check_table(name: str, shape: tuple, strides: tuple) -> None:
    if len(shape) != 2:
        raise ValueError(f"{name} must have two dimensions, rows and columns, not shape {tuple(shape)}")
    if 0 in shape:
        return  # NumPy may call every stride of an empty array 0
    if (shape[1] > 1 and strides[1] != 4) or strides[0] % 4:
        raise ValueError(f"{name} must have contiguous rows, not strides of {tuple(strides)} bytes")
    if shape[0] > 1 and abs(strides[0]) < 4 * shape[1]:
        raise ValueError(f"{name} has rows that overlap: strides of {tuple(strides)} bytes")


def _device_of(x: Any) -> int | None:
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    context = getattr(getattr(x, "gpu_data", None), "context", None)
    return None if context is None else int(context.device.id)


def _from_dlpack(x: Any, name: str) -> Any:
    for module in ("cupy", "torch"):
        library = sys.modules.get(module)
        if library is not None:
            return library.from_dlpack(x)
    raise TypeError(f"{name} is a {type(x).__name__}; reading it needs CuPy or torch to be installed")


def to_host(x: Any) -> np.ndarray:
    """Copy an array of any library to a NumPy array; waits for a GPU."""
    if isinstance(x, np.ndarray):
        return x
    library = library_of(x)
    if library == "torch":
        return x.detach().cpu().numpy()
    if library == "cupy":
        return x.get()
    if library == "numba":
        return x.copy_to_host()
    return np.asarray(x)


def differing(new: Any, old: Any, skip: int) -> tuple[Any, Any]:
    """Where two integer arrays of one library differ, and `old` with `skip` where they do not.

    Returns
    -------
    mask : array of bool
        ``new != old``, in their library, on their device.
    entries : array of int64
        Of the same library.
    """
    if library_of(old) == "torch":
        torch = sys.modules["torch"]
        mask = new != old
        return mask, torch.where(mask, old.long(), skip)
    library = sys.modules["cupy"] if library_of(old) == "cupy" else np
    mask = new != old
    return mask, library.where(mask, old.astype(np.int64), skip)


def to_torch(x: Any) -> Any:
    """Give an array to torch without a copy.

    Parameters
    ----------
    x : array
        A result of cupaged, or any array with ``__dlpack__`` or ``__cuda_array_interface__``, NumPy's included.

    Returns
    -------
    torch.Tensor
        Shares the memory of `x` and keeps it alive. A torch tensor comes back as it is.

    Raises
    ------
    ImportError
        If torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise ImportError('to_torch needs torch: pip install "cupaged[torch]"') from None
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    if hasattr(x, "__dlpack__"):
        return torch.from_dlpack(x)
    return torch.as_tensor(x, device=f"cuda:{_device_of(x) or 0}")


_READERS: dict[type, Any] = {}
_LIBRARIES: dict[type, str] = {}
_TENSORS: set[type] = set()  # torch.Tensor and what was seen of its subclasses
