"""The forms in which the package's Triton kernels are compiled, and what a compiler for GPUs makes of them.

As a script it compiles those of the names given (all without any) for each `--capability`, which needs no GPU, and
prints one JSON object: "name capability" -> registers of a thread, bytes of local memory of a thread, bytes of memory
that a block shares, its threads, and the instruction by which it multiplies matrices (none: "").
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

MODULES = (
    "hybrid_rl.models.heads.triton_logprobs",
    "hybrid_rl.engines.inplace.triton_decode",
    "hybrid_rl.engines.triton_sampling",
)
# Query heads, key heads and dims of the models that the kernels are mostly run on: Qwen2.5 0.5B, 1.5B, 3B and 7B,
# Qwen3 4B to 32B, Llama 3, Gemma 2 2B (soft-capped).
MODEL_HEADS = ((14, 2, 64), (12, 2, 128), (16, 2, 128), (28, 4, 128), (64, 8, 128), (32, 8, 128), (8, 4, 256))
# Columns of the vocabularies that are mostly seen: GPT-2, Llama 3, Qwen, Gemma.
VOCABULARIES = (50257, 128256, 151936, 256000)


class Form(NamedTuple):
    """One compiled form of a kernel. signature: the type of each argument that is not a constant, as Triton names it;
    constants: the values of the others; num_warps, num_stages: how it is launched."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


def forms() -> Iterator[Form]:
    """Those of all modules, each name once; of one of each kernel of the head also what a launch with every count 1
    compiles, where Triton takes them for constants."""
    for form in (*head_forms(), *decode_forms(), *sampling_forms()):
        yield form
        if form.name.endswith("-fp32-1000"):
            ones = [name for name, kind in form.signature.items() if kind == "i32" and not name.endswith("stride")]
            signature = {name: kind for name, kind in form.signature.items() if name not in ones}
            constants = form.constants | dict.fromkeys(ones, 1)
            yield form._replace(name=f"{form.name}-ones", signature=signature, constants=constants)


def head_forms() -> Iterator[Form]:
    """The kernels of the head in the forms that models in use are compiled for, with the constants of a launch."""
    from hybrid_rl.models.heads import triton_logprobs as head
    from hybrid_rl.models.heads.logit_options import HeadOptions

    depths = ((896, False, None), (3584, True, None), (2304, False, 30.0), (1000, True, 30.0))
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for (depth, has_bias, softcap), wide in itertools.product(depths, sorted({False, dtype == torch.bfloat16})):
            kinds = dict.fromkeys(("hidden", "weight", "bias", "grad_out"), f"*{short}") | {"labels": "*i64"}
            kinds |= dict.fromkeys(("scale", "softcap", "temperature"), "fp32") | (
                {"grad_out": "*fp32"} if wide else {}
            )
            hidden = torch.empty(1, depth, dtype=dtype, device="meta")
            tiles, options = head._tiles(hidden), HeadOptions(softcap=softcap, in_float32=wide)
            fixed = {name: value for name, value in tiles.items() if name.isupper()}
            bias = hidden[0] if has_bias else None
            fixed |= head._constants(hidden, bias, options) | {"hidden_step": 1, "weight_step": 1}
            for kernel in (head._sum_up, head._differentiate):
                columns = {name: "*fp32" for name in kernel.arg_names if name.endswith(("_in", "_out"))} | kinds
                types = {name: columns.get(name, "i32") for name in kernel.arg_names if name not in fixed}
                name = f"{kernel.__name__}-{short}-{depth}{'-wide' if wide else ''}"
                yield Form(name, kernel, types, fixed, tiles["num_warps"], tiles["num_stages"])


def decode_forms() -> Iterator[Form]:
    """The kernels of paged decoding in the forms that are compiled for the heads of common models, in blocks of 16
    tokens, in bfloat16 and float32, with the constants of a launch."""
    from hybrid_rl.engines.inplace import decode_kernels as kernels
    from hybrid_rl.engines.inplace import triton_decode as decode

    known = {"partial": "*fp32", "weight": "*fp32", "scale": "fp32", "softcap": "fp32"}
    known |= dict.fromkeys(("block_table", "context_length", "parts", "first"), "*i32")
    yield _form("plan", kernels.plan, decode._plan_constants(), known)
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        for num_heads, num_key_heads, dim in MODEL_HEADS:
            heads = decode._Heads(num_heads, num_key_heads, dim, dim, 16, itemsize, dim == 256)
            name = f"{dtype}-{num_heads}x{num_key_heads}x{dim}"
            tensors = dict.fromkeys(("query", "key_cache", "value_cache", "output", "key", "value"), f"*{dtype}")
            for what, kernel, constants in (
                ("attend", kernels.attend, decode._attend_constants(heads)),
                ("join", kernels.join, decode._join_constants(heads)),
                ("store", kernels.store, decode._store_constants(heads)),
            ):
                yield _form(f"{what}-{name}", kernel, constants, known | tensors)


def sampling_forms() -> Iterator[Form]:
    """The kernels of sampling in the forms that are compiled for common vocabularies and dtypes of logits, with the
    constants of a launch."""
    from hybrid_rl.engines import triton_sampling as sampling

    known = {"temperature": "*fp32", "uniform": "*fp64", "best": "*fp32", "total": "*fp64", "out": "*i32"}
    for dtype in ("fp32", "bf16"):
        types = known | {"logits": f"*{dtype}"}
        yield _form(f"summarise-{dtype}", sampling._summarise, sampling._block_constants(), types)
        seen = set()
        for num_columns in VOCABULARIES:
            constants = sampling._draw_constants(num_columns)
            if constants[0]["BLOCKS"] not in seen:
                seen.add(constants[0]["BLOCKS"])
                yield _form(f"draw-{dtype}-{num_columns}", sampling._draw, constants, types)


def _form(name: str, kernel: Any, constants: tuple[dict[str, Any], dict[str, int]], types: dict[str, str]) -> Form:
    """An argument that is neither constant nor among `types` is an integer."""
    values, launch = constants
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names if argument not in values}
    return Form(name, kernel, signature, values, launch["num_warps"], launch["num_stages"])


def kernels_of(module: Any) -> set[str]:
    """The kernels that a module launches: what stands before a grid, `kernel[grid](...)`."""
    return {name.rsplit(".", 1)[-1] for name in re.findall(r"([\w.]+)\[\s*\(.*?\)\s*\]\(", inspect.getsource(module))}


def compile_form(form: Form, capability: int) -> dict[str, Any]:
    """What the machine code of a form uses on a GPU of this capability (90: Hopper)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hints, signature, constants = {}, {}, {}
    for place, name in enumerate(form.kernel.arg_names):
        if name in form.constants:
            signature[name], constants[(place,)] = "constexpr", form.constants[name]
            continue
        signature[name] = form.signature[name]
        # As a launch finds them: memory of PyTorch's allocator, and rows of whole words.
        if signature[name].startswith("*") or "stride" in name or "_from_" in name:
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=form.kernel, signature=signature, constexprs=constants, attrs=hints)
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, local = _usage(done.asm["cubin"])
    return {
        "registers": registers,
        "local_bytes": local,
        "shared_bytes": done.metadata.shared,
        "threads": 32 * done.metadata.num_warps,
        "multiplies": next((word for word in ("wgmma", "mma.sync") if word in done.asm["ptx"]), ""),
    }


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a thread: what does not fit into registers lies there."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", text)
    (registers, stack, local) = map(int, found[-1])
    return registers, stack + local


def main() -> None:
    """Compile, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument(
        "--list", action="store_true", help="print names, kernels and what is launched; compile nothing"
    )
    given = parser.parse_args()
    every = list(forms())
    if given.list:
        launched = sorted(set().union(*(kernels_of(import_module(module)) for module in MODULES)))
        names = [[form.name, form.kernel.__name__] for form in every]
        print(json.dumps({"forms": names, "launched": launched, "triton": version("triton")}))
        return
    wanted = [form for form in every if form.name in given.names or not given.names]
    print(json.dumps({f"{f.name} {c}": compile_form(f, c) for c in given.capability for f in wanted}))


if __name__ == "__main__":
    main()
