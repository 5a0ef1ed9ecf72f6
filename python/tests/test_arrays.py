"""Memory of other people's tensors: numpy, the buffer protocol, DLPack; bfloat16 and float8 keep their type."""

import array
import ctypes

import ml_dtypes
import numpy as np
import pytest

import ballast
from ballast import TensorSpec, WeightSnapshot, _arrays
from test_store import HOT


class Opaque:
    """An array that shows itself by DLPack only, as a tensor of a framework does."""

    def __init__(self, value, versioned=True):
        self.value, self.versioned = value, versioned

    def __dlpack_device__(self):
        return self.value.__dlpack_device__()

    def __dlpack__(self, **named):
        if not self.versioned:
            if named:
                raise TypeError("an old one")
            return self.value.__dlpack__()
        return self.value.__dlpack__(**named)


class Interface:
    """An array that shows itself by numpy's interface only."""

    def __init__(self, value):
        self.value, self.__array_interface__ = value, value.__array_interface__


class Elsewhere(Opaque):
    def __dlpack_device__(self):
        return (2, 0)


class Framework(Opaque):
    """A tensor as a framework gives it, of a type that numpy may lack: numpy's own capsule of the bits, with the type replaced."""

    def __init__(self, value, dtype):
        super().__init__(value)
        [self.code] = [code for code, name in _arrays._FROM_DLPACK.items() if name == dtype]

    def __array__(self, *given, **named):
        raise TypeError("numpy has no such type")

    def __dlpack__(self, **named):
        capsule = self.value.__dlpack__()
        tensor = ctypes.cast(_arrays._capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_arrays._DLTensor)).contents
        tensor.dtype.code, tensor.dtype.bits = self.code
        return capsule


def put(store, name, specs, values):
    with store.weight_put(WeightSnapshot("default", name, "main", 1, tuple(specs)), None, policy=HOT) as writer:
        for key, value in values.items():
            writer.weight_put_tensor(key, value)
    return writer.identity


def test_bfloat16_and_float8_keep_their_type(store, name):
    values = {
        "bf16": np.arange(24, dtype=ml_dtypes.bfloat16).reshape(4, 6),
        "e4m3": np.arange(10, dtype=ml_dtypes.float8_e4m3fn),
        "e5m2": np.arange(10, dtype=ml_dtypes.float8_e5m2),
        "scalar": np.array(2, dtype=ml_dtypes.bfloat16),
    }
    record = ballast.save(values, name, store=store, policy=HOT)
    weights = ballast.load(name, store=store)
    assert weights.dtypes == {"bf16": "BF16", "e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "scalar": "BF16"}
    for key, value in values.items():
        assert weights[key].dtype == value.dtype and weights[key].tobytes() == value.tobytes() and weights[key].shape == value.shape
    # As bytes, for whoever has no such type.
    found = {key: np.empty(value.nbytes, dtype=np.uint8) for key, value in values.items()}
    store.weight_get(record.identity, None, found)
    assert all(found[key].tobytes() == value.tobytes() for key, value in values.items())
    with pytest.raises(ballast.InvalidArgumentError, match="BF16"):
        store.weight_get(record.identity, None, dict(found, bf16=np.empty((4, 6), np.float16)))


def test_without_ml_dtypes_the_bytes_stand_for_the_elements(store, name, monkeypatch):
    values = {"bf16": np.arange(24, dtype=ml_dtypes.bfloat16).reshape(4, 6)}
    ballast.save(values, name, store=store, policy=HOT)
    monkeypatch.setattr(_arrays, "_TO_NUMPY", {key: value for key, value in _arrays._TO_NUMPY.items() if key != "BF16"})
    weights = ballast.load(name, store=store)
    assert weights["bf16"].dtype == np.uint8 and weights["bf16"].shape == (4, 6, 2) and weights.dtypes["bf16"] == "BF16"
    assert weights["bf16"].tobytes() == values["bf16"].tobytes()


def test_elements_smaller_than_a_byte_travel_packed(store, name):
    packed = np.arange(16, dtype=np.uint8)
    identity = put(store, name, [TensorSpec("q", "F4", (2, 16))], {"q": packed})
    weights = ballast.load(identity, store=store)
    assert weights.dtypes["q"] == "F4" and np.array_equal(weights["q"], packed)
    assert ballast.open(identity, store=store).manifest.tensors["q"].shape == (2, 16)
    with pytest.raises(ballast.InvalidArgumentError, match="cut"):
        put(store, name + "x", [TensorSpec("q", "F4", (2, 16), fragments=(((0, 0), (1, 16)), ((1, 0), (1, 16))))], {})


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_goes_in_and_out_without_a_copy(store, name, versioned):
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    record = ballast.save({"w": Opaque(value, versioned)}, name, store=store, policy=HOT)
    out = np.zeros_like(value)
    store.weight_get(record.identity, None, {"w": Opaque(out, versioned)})
    assert np.array_equal(out, value)
    memory = _arrays.memory_of(Opaque(value, versioned), "w")
    assert (memory.address, memory.dtype, memory.shape) == (value.ctypes.data, "F32", (3, 4))


def test_dlpack_that_does_not_fit_is_refused(store, name):
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    for wrong, what in ((Elsewhere(value), "device"), (Opaque(value.T), "contiguous")):
        with pytest.raises(ballast.InvalidArgumentError, match=what):
            ballast.save({"w": wrong}, name, store=store)
    record = ballast.save({"w": value}, name, store=store, policy=HOT)
    frozen = value.copy()
    frozen.flags.writeable = False
    with pytest.raises(ballast.InvalidArgumentError, match="read-only|DLPack"):
        store.weight_get(record.identity, None, {"w": Opaque(frozen)})


def test_a_bfloat16_capsule_is_read_without_a_framework(store, name):
    value = np.arange(6, dtype=np.uint16)
    ballast.save({"w": Framework(value, "BF16")}, name, store=store, policy=HOT)
    weights = ballast.load(name, store=store)
    assert weights.dtypes["w"] == "BF16" and weights["w"].tobytes() == value.tobytes()


def test_buffers_go_in_and_out(store, name):
    given = {
        "array": array.array("f", [1, 2, 3]), "view": memoryview(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "numpy": np.arange(4, dtype=np.complex64), "big": np.arange(5, dtype="<u8"), "scalar": np.float64(7),
    }
    record = ballast.save(given, name, store=store, policy=HOT)
    weights = ballast.load(name, store=store)
    assert weights.dtypes == {"array": "F32", "view": "I16", "numpy": "C64", "big": "U64", "scalar": "F64"}
    assert list(weights["array"]) == [1, 2, 3] and weights["view"].shape == (2, 3) and weights["scalar"] == 7
    out = {"array": array.array("f", [0] * 3), "view": bytearray(12), "numpy": (ctypes.c_char * 32)(), "big": np.empty(5, np.uint64),
           "scalar": np.empty((), np.float64)}
    store.weight_get(record.identity, None, out)
    assert out["array"] == given["array"] and bytes(out["view"]) == bytes(given["view"]) and out["scalar"] == 7
    assert bytes(out["numpy"]) == given["numpy"].tobytes()


def test_plain_bytes_need_a_spec(store, name):
    with pytest.raises(ballast.InvalidArgumentError, match="plain bytes"):
        ballast.save({"w": b"12345678"}, name, store=store)
    identity = put(store, name, [TensorSpec("w", np.float32, (2,))], {"w": b"12345678"})
    assert ballast.load(identity, store=store)["w"].tobytes() == b"12345678"


def test_a_layout_that_is_not_contiguous_is_copied_by_save_only(store, name):
    value = np.arange(12, dtype=np.float32).reshape(3, 4).T
    ballast.save({"w": value}, name, store=store, policy=HOT)
    assert np.array_equal(ballast.load(name, store=store)["w"], value)


@pytest.mark.parametrize("given, expected", [
    ("float32", "F32"), ("torch.bfloat16", "BF16"), (np.float16, "F16"), (np.dtype("<i8"), "I64"), ("F8_E5M2", "F8_E5M2"),
    (ml_dtypes.bfloat16, "BF16"), ("bool", "BOOL"),
])
def test_types_go_by_several_names(given, expected):
    assert TensorSpec("w", given, (1,)).dtype == expected


@pytest.mark.parametrize("make", [
    lambda value: value, lambda value: memoryview(value), lambda value: Interface(value),
])
def test_big_endian_arrays_are_refused_with_the_way_to_convert_them(store, name, make):
    value = np.arange(6, dtype=">f4")
    with pytest.raises(ballast.InvalidArgumentError, match=r"big-endian.*\.astype\(array\.dtype\.newbyteorder\(\"<\"\)\)") as refused:
        ballast.save({"w": make(value)}, name, store=store)
    assert refused.value.details["tensor"] == "w"
    ballast.save({"w": make(value.astype(value.dtype.newbyteorder("<")))}, name, store=store, policy=HOT)
    assert np.array_equal(ballast.load(name, store=store)["w"], value)


@pytest.mark.parametrize("dtype", ["complex128", "object", "U3", "M8[s]"])
def test_a_type_that_can_not_be_stored_is_refused_by_name(store, name, dtype):
    with pytest.raises(ballast.InvalidArgumentError, match="has the dtype") as refused:
        ballast.save({"w": np.zeros(3, dtype)}, name, store=store)
    assert refused.value.details["tensor"] == "w" and str(np.dtype(dtype)) in refused.value.message


@pytest.mark.parametrize("shape", [4, None, "46", (2.5, 2), ("a",), (-1, 3), (2**63,)])
def test_a_shape_is_of_whole_numbers(shape):
    for wrong in (dict(shape=shape), dict(fragments=((shape, (1, 1)),)), dict(fragments=(((0, 0), shape),))):
        with pytest.raises(ballast.InvalidArgumentError, match="shape") as refused:
            TensorSpec("w", "F32", **{"shape": (4, 6), **wrong})
        assert refused.value.details["tensor"] == "w"
    assert TensorSpec("w", "F32", np.array([4, 6])).shape == (4, 6)
