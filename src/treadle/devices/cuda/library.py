"""Functions of NVIDIA's driver through ctypes, with the signatures and constants of ``cuda.h``.

``libcuda.so.1`` comes with the driver; nothing else is needed. A test compares both tables with the
header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong
from ctypes import c_void_p as handle
from typing import Any

from treadle.errors import DeviceError, NoMemoryError

NAMES = "libcuda.so.1", "nvcuda.dll"
device_ptr = c_ulonglong  # CUdeviceptr
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(handle), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (handle,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(device_ptr), c_size_t),
    "cuMemFree_v2": (device_ptr,),
    "cuMemHostAlloc": (POINTER(handle), c_size_t, c_uint),
    "cuMemFreeHost": (handle,),
    "cuMemcpyHtoDAsync_v2": (device_ptr, handle, c_size_t, handle),
    "cuMemcpyDtoHAsync_v2": (handle, device_ptr, c_size_t, handle),
    "cuMemcpyDtoDAsync_v2": (device_ptr, device_ptr, c_size_t, handle),
    "cuMemsetD8Async": (device_ptr, ctypes.c_ubyte, c_size_t, handle),
    "cuModuleLoadDataEx": (POINTER(handle), handle, c_uint, POINTER(c_int), POINTER(handle)),
    "cuModuleUnload": (handle,),
    "cuModuleGetFunction": (POINTER(handle), handle, c_char_p),
    "cuFuncSetAttribute": (handle, c_int, c_int),
    "cuStreamCreate": (POINTER(handle), c_uint),
    "cuStreamSynchronize": (handle,),
    "cuStreamDestroy_v2": (handle,),
    "cuStreamBeginCapture_v2": (handle, c_int),
    "cuStreamEndCapture": (handle, POINTER(handle)),
    "cuGraphInstantiateWithFlags": (POINTER(handle), handle, c_ulonglong),
    "cuGraphLaunch": (handle, handle),
    "cuGraphExecDestroy": (handle,),
    "cuGraphDestroy": (handle,),
    "cuLaunchKernel": (handle, *(c_uint,) * 7, handle, POINTER(handle), POINTER(handle)),
    "cuEventCreate": (POINTER(handle), c_uint),
    "cuEventRecord": (handle, handle),
    "cuEventElapsedTime": (POINTER(c_float), handle, handle),
    "cuEventDestroy_v2": (handle,),
}
# Constants of cuda.h that are passed or returned.
CONSTANTS = {
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
    "CU_JIT_ERROR_LOG_BUFFER": 5,
    "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": 6,
    "CU_STREAM_NON_BLOCKING": 1,
    # The garbage collector may free memory while a graph is recorded.
    "CU_STREAM_CAPTURE_MODE_RELAXED": 2,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": 209,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": 222,
}


class Library:
    """The driver's functions, called by name; an error code is raised as DeviceError or
    NoMemoryError.
    """

    def __init__(self, found: Any) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        for name, types in SIGNATURES.items():
            try:
                function = getattr(found, name)
            except AttributeError:
                raise DeviceError(f"the GPU driver is too old: it lacks {name}") from None
            function.argtypes = types
            function.restype = c_int
            self._functions[name] = function

    def __call__(self, name: str, *args: Any) -> None:
        if code := self._functions[name](*args):
            raise self.error(name, code)

    def error(self, name: str, code: int) -> DeviceError:
        """Return the exception for the error ``code`` of function ``name``."""
        told = []
        for of in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if not self._functions[of](code, byref(text)) and text.value:
                told.append(text.value.decode("utf-8", "replace"))
        kind = NoMemoryError if code == CONSTANTS["CUDA_ERROR_OUT_OF_MEMORY"] else DeviceError
        error = kind(f"the GPU driver: {': '.join(told) or f'error {code}'} (in {name})")
        error.code = code
        return error


def find_library() -> Library:
    """Load this machine's GPU driver. Raises DeviceError if there is none."""
    for name in NAMES:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        return Library(found)
    raise DeviceError(f"no GPU driver found: cannot load {NAMES[0]} or {NAMES[1]}")
