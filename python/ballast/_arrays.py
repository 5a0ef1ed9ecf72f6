"""Memory of other people's tensors: where it is, what is in it, whether it may be written. Never a copy.

Numpy arrays, torch tensors (when torch is there), anything with DLPack or the buffer protocol. Element types go by their
safetensors names; those that numpy lacks (`BF16`, `F8_E4M3`, …) are numpy types when `ml_dtypes` is there, bytes otherwise.
"""

import ctypes
import sys

import numpy as np

from ._errors import invalid

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

_PLAIN = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16", "U32": "uint32",
    "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}
_EXTENDED = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
# Elements smaller than a byte: always bytes.
_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_ITEMSIZE = {
    **{name: np.dtype(plain).itemsize for name, plain in _PLAIN.items()},
    **{name: 2 if name == "BF16" else 1 for name in _EXTENDED},
}

_TO_NUMPY = {name: np.dtype(plain) for name, plain in _PLAIN.items()}
if ml_dtypes is not None:
    for _name, _type in _EXTENDED.items():
        if hasattr(ml_dtypes, _type):
            _TO_NUMPY[_name] = np.dtype(getattr(ml_dtypes, _type))
_FROM_NUMPY = {dtype: name for name, dtype in _TO_NUMPY.items()}

# Names that torch (and others) use.
_FROM_WORD = {**{plain: name for name, plain in _PLAIN.items()}, **{word: name for name, word in _EXTENDED.items()}}
_FROM_DLPACK = {
    (0, 8): "I8", (0, 16): "I16", (0, 32): "I32", (0, 64): "I64", (1, 8): "U8", (1, 16): "U16", (1, 32): "U32", (1, 64): "U64",
    (2, 16): "F16", (2, 32): "F32", (2, 64): "F64", (4, 16): "BF16", (5, 64): "C64", (6, 8): "BOOL", (10, 8): "F8_E4M3",
    (11, 8): "F8_E4M3FNUZ", (12, 8): "F8_E5M2", (13, 8): "F8_E5M2FNUZ", (14, 8): "F8_E8M0",
}
_CPU_DEVICES = (1, 3, 11)  # DLPack: CPU, and CUDA and ROCm memory that the CPU reaches


def known_dtype(name, tensor):
    """`name` as a safetensors name; numpy dtypes and torch's words (`bfloat16`, `torch.bfloat16`) will do as well."""
    if isinstance(name, str):
        if name in _ITEMSIZE or name in _PACKED:
            return name
        word = name.rsplit(".", 1)[-1]
        if word in _FROM_WORD:
            return _FROM_WORD[word]
    elif name is not None:
        word = str(name).rsplit(".", 1)[-1]
        if word in _FROM_WORD:
            return _FROM_WORD[word]
        try:
            return _FROM_NUMPY[np.dtype(name)]
        except (KeyError, TypeError):
            pass
    if isinstance(name, np.dtype) and name.newbyteorder("<") in _FROM_NUMPY:
        message = f"tensor {tensor!r} is big-endian ({name}); convert it: array.astype(array.dtype.newbyteorder(\"<\"))"
        raise invalid(message, tensor=tensor)
    shown = str(name) if isinstance(name, np.dtype) else repr(name)
    message = f"tensor {tensor!r} has the dtype {shown}; give one of {', '.join([*_ITEMSIZE, *_PACKED])}"
    raise invalid(message, tensor=tensor)


def numpy_dtype(name):
    """The numpy type of a safetensors name; `None` when there is none."""
    return _TO_NUMPY.get(name)


def byte_count(dtype, shape):
    """Bytes of a tensor."""
    count = 1
    for extent in shape:
        count *= extent
    return count * _PACKED[dtype] // 8 if dtype in _PACKED else count * _ITEMSIZE[dtype]


def is_extended(dtype):
    """Whether plain numpy has no such type, so that its bytes stand for it."""
    return dtype in _EXTENDED or dtype in _PACKED


class Memory:
    """A contiguous stretch of memory: `dtype` and `shape` are `None` for plain bytes. Keeps its owner alive."""

    __slots__ = ("address", "nbytes", "dtype", "shape", "writable", "owner")

    def __init__(self, address, nbytes, dtype, shape, writable, owner):
        self.address = address if nbytes else 0
        self.nbytes = nbytes
        self.dtype = dtype
        self.shape = shape
        self.writable = writable
        self.owner = owner


def _torch():
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "Tensor") else None


def memory_of(value, name):
    """Where the elements of `value` lie, without copying. `name` is the tensor that errors speak of."""
    torch = _torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(value, name)
    if isinstance(value, np.ndarray) or isinstance(value, np.generic):
        return _of_numpy(np.asarray(value), name)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value, name)
    if hasattr(value, "__array_interface__"):
        return _of_numpy(np.asarray(value), name)
    try:
        view = memoryview(value)
    except TypeError:
        message = f"tensor {name!r} is a {type(value).__name__}; give a numpy array, or anything with DLPack or the buffer protocol"
        raise invalid(message, tensor=name) from None
    return _of_buffer(view, name)


def _not_contiguous(name):
    return invalid(f"tensor {name!r} is not contiguous in C order; give a contiguous copy of it (numpy.ascontiguousarray, say)", tensor=name)


def _of_numpy(array, name):
    if not array.flags.c_contiguous:
        raise _not_contiguous(name)
    return Memory(array.ctypes.data, array.nbytes, known_dtype(array.dtype, name), array.shape, array.flags.writeable, array)


def _of_torch(tensor, name):
    if tensor.device.type != "cpu":
        raise invalid(f"tensor {name!r} is on the device {tensor.device}; give it on the CPU (tensor.cpu())", tensor=name)
    if not tensor.is_contiguous():
        raise _not_contiguous(name)
    dtype = known_dtype(str(tensor.dtype), name)
    nbytes = tensor.numel() * tensor.element_size()
    return Memory(tensor.data_ptr(), nbytes, dtype, tuple(tensor.shape), True, tensor)


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", _DLDevice), ("ndim", ctypes.c_int32), ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", _DLTensor),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype = ctypes.c_int
_capsule_is.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _of_dlpack(value, name):
    if hasattr(value, "__dlpack_device__"):
        device = value.__dlpack_device__()
        if int(device[0]) not in _CPU_DEVICES:
            raise invalid(f"tensor {name!r} is on device {tuple(int(part) for part in device)}; give it on the CPU", tensor=name)
    try:
        try:
            capsule = value.__dlpack__(max_version=(1, 0))
        except TypeError:
            capsule = value.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as error:
        raise invalid(f"tensor {name!r} can not be had by DLPack: {error}", tensor=name) from error
    writable = True
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = ctypes.cast(_capsule_pointer(capsule, b"dltensor_versioned"), ctypes.POINTER(_DLManagedVersioned)).contents
        if managed.major != 1:
            raise invalid(f"tensor {name!r} is of DLPack version {managed.major}, expected 1", tensor=name)
        tensor, writable = managed.tensor, not managed.flags & 1
    elif _capsule_is(capsule, b"dltensor"):
        tensor = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    else:
        raise invalid(f"tensor {name!r} gave a DLPack capsule that is none", tensor=name)
    code = (tensor.dtype.code, tensor.dtype.bits)
    if tensor.dtype.lanes != 1 or code not in _FROM_DLPACK:
        raise invalid(f"tensor {name!r} has the DLPack type {(*code, tensor.dtype.lanes)}, which can not be stored", tensor=name)
    shape = tuple(tensor.shape[dim] for dim in range(tensor.ndim))
    dtype = _FROM_DLPACK[code]
    nbytes = byte_count(dtype, shape)
    if tensor.strides and nbytes:
        step = 1
        for dim in reversed(range(tensor.ndim)):
            if shape[dim] > 1 and tensor.strides[dim] != step:
                raise _not_contiguous(name)
            step *= shape[dim]
    # The capsule, unconsumed, keeps the memory; its own destructor frees it.
    return Memory((tensor.data or 0) + tensor.byte_offset, nbytes, dtype, shape, writable, (value, capsule))


def _of_buffer(view, name):
    if not view.c_contiguous:
        raise _not_contiguous(name)
    dtype, shape = None, None
    # One-dimensional plain bytes say nothing of what is in them.
    if not (view.ndim == 1 and view.format.lstrip("@=<") in ("B", "b", "c")):
        try:
            dtype = known_dtype(np.dtype(view.format), name)
        except TypeError:
            raise invalid(f"tensor {name!r} has the buffer format {view.format!r}, which can not be stored", tensor=name) from None
        shape = view.shape
    # numpy finds the address of any contiguous buffer, whatever its format.
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data if view.nbytes else 0
    return Memory(address, view.nbytes, dtype, shape, not view.readonly, view)


def check(memory, name, dtype, shape, writable):
    """Whether memory can stand for a tensor (or a box of one) of that type and shape; names what is wrong."""
    expected = byte_count(dtype, shape)
    if writable and not memory.writable:
        raise invalid(f"tensor {name!r}: the target buffer is read-only; give one that can be written", tensor=name)
    plain_bytes = memory.dtype is None or (memory.dtype == "U8" and is_extended(dtype))
    if not plain_bytes and memory.dtype != dtype:
        message = f"tensor {name!r}: the buffer has dtype {memory.dtype}, expected {dtype}; bytes are copied, never converted"
        raise invalid(message, tensor=name, expected=dtype, found=memory.dtype)
    if memory.nbytes != expected:
        message = f"tensor {name!r}: the buffer has {memory.nbytes} bytes, {dtype} {list(shape)} needs {expected}"
        raise invalid(message, tensor=name, expected=expected, found=memory.nbytes)
    if not plain_bytes and tuple(memory.shape) != tuple(shape):
        message = f"tensor {name!r}: the buffer has shape {list(memory.shape)}, expected {list(shape)}"
        raise invalid(message, tensor=name, expected=list(shape), found=list(memory.shape))


def array_of(view):
    """A read-only numpy array over a native view. What numpy has no type for comes as bytes, with one more dimension."""
    flat = np.asarray(view)
    dtype = numpy_dtype(view.dtype)
    if dtype is not None:
        return flat.view(dtype).reshape(view.shape)
    if view.dtype in _PACKED:
        return flat
    return flat.reshape([*view.shape, -1] if view.nbytes else [*view.shape, _ITEMSIZE.get(view.dtype, 1)])
