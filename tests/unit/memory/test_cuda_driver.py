"""The compiled half of regions on GPUs: its picture of CUDA's driver is that of cuda.h, and what it takes and gives."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.cuda.cuda_stand_in import built

ROOT = Path(__file__).parents[3]
SITE = Path(torch.__file__).parents[1]

CHECK = r"""
#include <cuda.h>
#include <ATen/dlpack.h>
#include <cstddef>
#include <type_traits>
#include "cuda_driver.h"
#include "cuda_region.h"
namespace ours = hybrid_rl::cuda;
#define SAME(a, b) static_assert((a) == (b), #a " is not " #b)
#define SAME_FIELD(ours_, field, theirs, other) \
  SAME(offsetof(ours_, field), offsetof(theirs, other)); \
  SAME(sizeof(((ours_*)nullptr)->field), sizeof(((theirs*)nullptr)->other))

SAME(sizeof(CUresult), sizeof(ours::Result));
SAME(CUDA_SUCCESS, ours::kSuccess);
SAME(CUDA_ERROR_OUT_OF_MEMORY, ours::kOutOfMemory);
SAME(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ours::kHasVirtualMemory);
SAME(CU_MEM_ALLOCATION_TYPE_PINNED, ours::kPinned);
SAME(CU_MEM_LOCATION_TYPE_DEVICE, ours::kOnDevice);
SAME(CU_MEM_HANDLE_TYPE_NONE, 0);
SAME(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, ours::kReadWrite);
SAME(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, ours::kRecommended);
SAME(sizeof(CUmemLocation), sizeof(ours::Location));
SAME_FIELD(ours::Location, id, CUmemLocation, id);
SAME(sizeof(CUmemAllocationProp), sizeof(ours::Properties));
SAME_FIELD(ours::Properties, type, CUmemAllocationProp, type);
SAME_FIELD(ours::Properties, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD(ours::Properties, location, CUmemAllocationProp, location);
SAME_FIELD(ours::Properties, win32, CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(ours::Properties, flags, CUmemAllocationProp, allocFlags);
SAME_FIELD(ours::Properties, flags.usage, CUmemAllocationProp, allocFlags.usage);
SAME(sizeof(CUmemAccessDesc), sizeof(ours::Access));
SAME_FIELD(ours::Access, flags, CUmemAccessDesc, flags);

// A function: as many arguments, and each is passed alike.
template <typename A, typename B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;
template <typename A, typename B>
struct Alike : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
  requires(sizeof...(A) == sizeof...(B))
struct Alike<R (*)(A...), S (*)(B...)> : std::bool_constant<alike<R, S> && (alike<A, B> && ...)> {};
#define CHECK(name, ...) static_assert(Alike<decltype(ours::Driver::name), decltype(&::name)>::value, #name);
HYBRID_RL_CUDA_FUNCTIONS(CHECK)

namespace dl = hybrid_rl::dlpack;
SAME(sizeof(dl::DLTensor), sizeof(::DLTensor));
SAME_FIELD(dl::DLTensor, device_type, ::DLTensor, device.device_type);
SAME_FIELD(dl::DLTensor, device_id, ::DLTensor, device.device_id);
SAME_FIELD(dl::DLTensor, ndim, ::DLTensor, ndim);
SAME_FIELD(dl::DLTensor, code, ::DLTensor, dtype.code);
SAME_FIELD(dl::DLTensor, bits, ::DLTensor, dtype.bits);
SAME_FIELD(dl::DLTensor, lanes, ::DLTensor, dtype.lanes);
SAME_FIELD(dl::DLTensor, shape, ::DLTensor, shape);
SAME_FIELD(dl::DLTensor, byte_offset, ::DLTensor, byte_offset);
SAME(sizeof(dl::DLManagedTensor), sizeof(::DLManagedTensor));
SAME_FIELD(dl::DLManagedTensor, deleter, ::DLManagedTensor, deleter);
SAME(kDLCPU, 1);
SAME(kDLCUDA, 2);
SAME(kDLUInt, 1);
"""


def headers() -> Path | None:
    """A folder with cuda.h: of a toolkit, of pip's packages, or of Triton."""
    found = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
    found += [*SITE.glob("nvidia/*/include/cuda.h"), *SITE.glob("triton/backends/nvidia/include/cuda.h")]
    return found[0].parent if found else None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("kHasVirtualMemory = 102", "kHasVirtualMemory = 103"),
        ("int type, handle_types;", "int type; long handle_types;"),
        ("F(cuMemAddressFree, Pointer, size_t)", "F(cuMemAddressFree, Pointer)"),
    ],
    ids=["as it is", "a wrong number", "a wrong layout", "a wrong signature"],
)
def test_what_is_declared_is_what_cuda_declares(tmp_path: Path, right: str, wrong: str) -> None:
    folder, compiler = headers(), shutil.which("c++") or shutil.which("g++")
    if folder is None or compiler is None:
        pytest.skip("needs cuda.h (set up a CUDA toolkit, or pip install nvidia-cuda-runtime) and a C++ compiler")
    for name in ("cuda_driver.h", "cuda_region.h"):
        text = (ROOT / "csrc" / name).read_text()
        (tmp_path / name).write_text(text.replace(right, wrong) if right else text)
    (tmp_path / "check.cpp").write_text(CHECK)
    # ATen's folder holds dlpack.h, which takes nothing else of PyTorch.
    include = [f"-I{tmp_path}", f"-I{folder}", f"-I{Path(torch.__file__).parent / 'include'}"]
    command = [compiler, "-std=c++20", "-fsyntax-only", *include, str(tmp_path / "check.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not right), done.stderr[-3000:]


def test_the_library_takes_no_cuda_no_torch_and_no_python_and_never_ends_the_process() -> None:
    """As setup.py builds it."""
    nm, installed = shutil.which("nm"), built().library
    if nm is None:
        pytest.skip("needs nm (binutils)")
    listed = subprocess.run([nm, "-D", str(installed)], capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[-1].split("@")[0] for line in listed.splitlines() if " U " in line}
    assert "dlopen" in wanted
    assert not [
        name for name in wanted if re.match(r"cu[A-Z]|cuda|Py|_Py|aoti|_?exit$|abort$|quick_exit$|raise$", name)
    ]
    given = {line.split()[-1] for line in listed.splitlines() if " T " in line}
    header = (ROOT / "csrc" / "cuda_region.h").read_text()
    assert given == set(re.findall(r"hybrid_rl_region_\w+(?=\()", header)) and len(given) == 9
