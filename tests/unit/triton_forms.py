"""The forms in which the package's Triton kernels are compiled, and what a compiler for GPUs makes of them.

As a script it compiles those of the names given (all without any) for each `--capability`, which needs no GPU, and
prints one JSON object: "name capability" -> registers of a thread, bytes of local memory of a thread, bytes of memory
that a block shares, its threads.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

MODULES = (
    "hybrid_rl.models.triton_logprobs",
    "hybrid_rl.rollout.inplace.triton_decode",
    "hybrid_rl.rollout.triton_sampling",
)


class Form(NamedTuple):
    """As the `specialisations` of the modules: signature has the type of each argument that is no constant."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


def forms() -> Iterator[Form]:
    """Those of all modules, each name once."""
    for name in MODULES:
        module = import_module(name)
        yield from (Form(*form) for form in getattr(module, "specialisations", _of_the_head)())


def _of_the_head() -> Iterator[Form]:
    """Of `models/triton_logprobs.py`, as its launches make them."""
    import torch

    from hybrid_rl.models import triton_logprobs as head

    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for depth, has_bias, softcap in ((896, False, None), (3584, True, None), (2304, False, 30.0)):
            hidden = torch.empty(1, depth, dtype=dtype, device="meta")
            bias = hidden[0] if has_bias else None
            tiles = head._tiles(hidden)
            fixed = {name: value for name, value in tiles.items() if name.isupper()}
            fixed |= head._constants(hidden, bias, softcap) | {"hidden_step": 1, "weight_step": 1}
            kinds = dict.fromkeys(("hidden", "weight", "bias", "grad_out"), f"*{short}") | {"labels": "*i64"}
            kinds |= dict.fromkeys(("scale", "softcap", "temperature"), "fp32")
            for kernel in (head._sum_up, head._differentiate):
                signature = {
                    name: kinds.get(name, "*fp32" if name.endswith(("_in", "_out")) else "i32")
                    for name in kernel.arg_names
                    if name not in fixed
                }
                name = f"{kernel.__name__}-{short}-{depth}"
                yield Form(name, kernel, signature, fixed, tiles["num_warps"], tiles["num_stages"])


def kernels_of(module: Any) -> set[str]:
    """The kernels that a module launches: what stands before a grid, `kernel[grid](...)`."""
    return {name.rsplit(".", 1)[-1] for name in re.findall(r"([\w.]+)\[\s*\(.*?\)\s*\]\(", inspect.getsource(module))}


def compile_form(form: Form, capability: int) -> dict[str, int]:
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
        print(json.dumps({"forms": [[form.name, form.kernel.__name__] for form in every], "launched": launched}))
        return
    wanted = [form for form in every if form.name in given.names or not given.names]
    print(json.dumps({f"{f.name} {c}": compile_form(f, c) for c in given.capability for f in wanted}))


if __name__ == "__main__":
    main()
